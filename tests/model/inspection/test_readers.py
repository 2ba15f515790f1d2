"""Programs of each format are read without their weights; other files are rejected with a reason."""

import contextlib
import io
import json
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from whisperport.errors import ProgramError
from whisperport.model.inspection import protobuf_skeleton
from whisperport.model.inspection.cost import cost_of
from whisperport.model.inspection.graph import Graph
from whisperport.model.inspection.protobuf_skeleton import skeleton
from whisperport.model.inspection.read import read_graphs
from whisperport.model.inspection.read_exported import read_exported
from whisperport.model.inspection.read_onnx import MODEL
from whisperport.model.inspection.rejections import check_graph
from whisperport.targets import get_target

from .conftest import NPU
from .tflite_file import INT32, Op, T, linear_file, outside_file, tflite_file


class Block(nn.Module):
    """Contains every kind of argument: a lookup, a cast, a list, an optional argument that is not given."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.norm = nn.LayerNorm(16)
        self.register_buffer("mask", torch.zeros(8, 8))

    def forward(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(self.table(tokens).to(x.dtype) + x)
        h = F.scaled_dot_product_attention(h, h, h, self.mask)
        first, second = h.split(8, -1)
        return torch.cat([first, second], -1) @ self.table.weight.T, first


def exported_block() -> Any:
    inputs = (torch.ones(1, 8, dtype=torch.int64), torch.rand(1, 8, 16))
    return torch.export.export(Block().eval(), inputs, strict=False)


@pytest.fixture(scope="module")
def pt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "block.pt2"
    torch.export.save(exported_block(), path)
    return path


def onnx_model(*, opset: int = 18, rows: int = 100, dynamic: bool = False) -> onnx.ModelProto:
    """x (1, 3, 16) · w (16, rows), reshaped, and a softmax; w takes more bytes than are kept."""
    weight = np.random.default_rng(0).random((16, rows), np.float32)
    nodes = [
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("MatMul", ["same", "w"], ["h"], name="product"),
        helper.make_node("Reshape", ["h", "shape"], ["flat"], name="flat"),
        helper.make_node("Softmax", ["flat"], ["y"], name="soft", axis=-1),
    ]
    axis = "n" if dynamic else 3
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, axis, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(weight, "w"),
            numpy_helper.from_array(np.array([-1, rows], np.int64), "shape"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "model.onnx"
    onnx.save(onnx_model(), path)
    return path


@pytest.fixture(scope="module")
def tflite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "model.tflite"
    path.write_bytes(linear_file())
    return path


def shapes(graph: Graph) -> list[tuple[Any, ...]]:
    return [
        (
            n.op,
            n.original_op,
            n.module,
            [(v.shape, v.dtype, v.constant) for v in (*n.tensors, *n.outputs)],
        )
        for n in graph.nodes
    ]


# Right ones ----------------------------------------------------------------------------------------


def test_a_pt2_file_is_read_as_the_same_program_in_memory_is(pt2: Path) -> None:
    (graph,) = read_graphs(pt2)

    in_memory = read_exported("block", torch.export.load(pt2))
    assert graph.name == "block"
    assert shapes(graph) == shapes(in_memory)
    assert [(v.shape, v.dtype) for v in graph.inputs] == [
        ((1, 8), "int64"),
        ((1, 8, 16), "float32"),
    ]
    assert [v.shape for v in graph.outputs] == [(1, 8, 40), (1, 8, 8)]


def test_the_same_is_rejected_of_a_pt2_file_as_of_the_program_in_memory(pt2: Path) -> None:
    spec = get_target("xnnpack").spec

    def found(graph: Graph) -> list[tuple[str, str]]:
        return [
            (kind.rule, p.reason)
            for kind in check_graph(graph, spec).findings
            for p in kind.occurrences
        ]

    (graph,) = read_graphs(pt2)
    assert found(graph) == found(read_exported("block", torch.export.load(pt2))) != []


def test_no_code_in_a_pt2_file_is_run(pt2: Path, tmp_path: Path) -> None:
    """Its example inputs are a pickle, which `torch.export.load` may open."""
    trap, armed = tmp_path / "trap", tmp_path / "armed.pt2"

    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (trap,)

    with zipfile.ZipFile(pt2) as old, zipfile.ZipFile(armed, "w") as new:
        for entry in old.infolist():
            data = old.read(entry)
            new.writestr(entry, pickle.dumps(Trap()) if "sample_inputs" in entry.filename else data)

    (graph,) = read_graphs(armed)

    assert graph.nodes
    assert not trap.exists()


def test_an_onnx_file_is_read_with_its_shapes_and_without_its_weights(onnx_file: Path) -> None:
    (graph,) = read_graphs(onnx_file)

    matmul, flat, soft = graph.nodes
    assert (matmul.op, matmul.original_op, matmul.name) == ("matmul", "MatMul", "product")
    assert [v.shape for v in matmul.tensors] == [(1, 3, 16), (16, 100)]
    assert [v.constant for v in matmul.tensors] == [False, True]
    assert (flat.output.shape, soft.output.shape) == ((3, 100), (3, 100))
    assert soft.attributes == {"dim": -1}
    assert graph.opset == 18
    assert cost_of(graph).flops == 2 * 3 * 100 * 16 + 5 * 3 * 100


def test_what_is_left_of_an_onnx_file_does_not_grow_with_its_weights(onnx_file: Path) -> None:
    def left(rows: int) -> int:
        data = onnx_model(rows=rows).SerializeToString()
        return len(skeleton(io.BytesIO(data), len(data), MODEL))

    assert abs(left(100_000) - left(1000)) < 20
    whole = onnx_model(rows=10)  # 640 bytes of weights: kept
    data = whole.SerializeToString()
    assert onnx.load_model_from_string(skeleton(io.BytesIO(data), len(data), MODEL)) == whole


def test_an_onnx_file_of_zeros_or_of_countless_fields_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protobuf_skeleton, "MAX_SKELETON_BYTES", 10_000)
    (tmp_path / "zeros.onnx").write_bytes(bytes(2000))  # as a download that was cut leaves them
    (tmp_path / "fields.onnx").write_bytes(b"\x08\x0a" * 1000)

    for name, why in (("zeros", "the number 0"), ("fields", "more than 10000 bytes remain")):
        with pytest.raises(ProgramError) as error:
            read_graphs(tmp_path / f"{name}.onnx")
        assert why in error.value.why


def test_onnx_weights_beside_the_file_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(onnx_model(), path, save_as_external_data=True, location="w.bin", size_threshold=0)

    (graph,) = read_graphs(path)

    assert [node.op for node in graph.nodes] == ["matmul", "reshape", "softmax"]


def test_what_onnx_computes_from_constants_is_a_constant(tmp_path: Path) -> None:
    nodes = [
        helper.make_node(
            "Constant", [], ["half"], value=numpy_helper.from_array(np.ones((4, 4), "f2"))
        ),
        helper.make_node("Cast", ["half"], ["w"], to=TensorProto.FLOAT),
        helper.make_node("Gemm", ["x", "w", "b"], ["y"]),
    ]
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 4])]
    made = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 4])]
    bias = numpy_helper.from_array(np.ones(4, np.float32), "b")
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", given, made, [bias])), path)

    ((gemm,),) = (graph.nodes for graph in read_graphs(path))

    assert (gemm.op, gemm.original_op) == ("linear", "Gemm")
    assert [v.constant for v in gemm.tensors] == [False, True, True]


def test_a_tflite_file_is_read(tflite: Path) -> None:
    (graph,) = read_graphs(tflite)

    linear, soft = graph.nodes
    assert (linear.op, linear.original_op) == ("linear", "FULLY_CONNECTED")
    assert [(v.shape, v.constant) for v in linear.tensors] == [
        ((2, 3), False),
        ((4, 3), True),
        ((4,), True),
    ]
    assert soft.attributes == {"dim": -1}
    assert cost_of(graph).flops == 2 * 2 * 3 * 4 + 8 + 5 * 8


def test_axes_of_a_tflite_mean_are_read_from_its_constant(tmp_path: Path) -> None:
    axes = T((1,), INT32, np.array([2], np.int32).tobytes())
    data = tflite_file([T((1, 4, 8)), axes, T((1, 4))], [Op("MEAN", [0, 1], [2])], [0], [2])
    (tmp_path / "m.tflite").write_bytes(data)

    (graph,) = read_graphs(tmp_path / "m.tflite")

    assert graph.nodes[0].attributes == {"dim": [2], "keepdim": False}
    assert [v.shape for v in graph.nodes[0].tensors] == [(1, 4, 8)]


def test_tflite_weights_after_the_tables_are_constants_and_all_there(tmp_path: Path) -> None:
    start = 4096
    path = tmp_path / "outside.tflite"
    path.write_bytes(outside_file(start, 48).ljust(start, b"\0") + bytes(48))

    (graph,) = read_graphs(path)

    assert [value.constant for value in graph.nodes[0].tensors] == [False, True]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ProgramError) as raised:
        read_graphs(path)
    assert (
        "buffer 2 ends at byte 4144, but the file has 4143 bytes: it is incomplete"
        in raised.value.why
    )


def two_entries(path: Path) -> Path:
    """RELU of (2, 3) as "first", NEG of (4, 5) as "second", and an ABS that no signature names."""
    from ai_edge_litert import schema_py_generated as t

    model = t.ModelT()
    model.version, model.buffers = 3, [t.BufferT()]
    model.subgraphs, model.operatorCodes, model.signatureDefs = [], [], []
    kinds = [("first", "RELU", [2, 3]), ("second", "NEG", [4, 5]), ("", "ABS", [1])]
    for place, (key, operator, shape) in enumerate(kinds):
        graph, code, op = t.SubGraphT(), t.OperatorCodeT(), t.OperatorT()
        graph.tensors = [t.TensorT(), t.TensorT()]
        for name, tensor in zip("xy", graph.tensors, strict=True):
            tensor.name, tensor.shape = name, shape
        code.builtinCode = code.deprecatedBuiltinCode = getattr(t.BuiltinOperator, operator)
        op.opcodeIndex, op.inputs, op.outputs = place, [0], [1]
        graph.inputs, graph.outputs, graph.operators = [0], [1], [op]
        model.subgraphs.append(graph)
        model.operatorCodes.append(code)
        if key:
            signature = t.SignatureDefT()
            signature.signatureKey, signature.subgraphIndex = key, place
            signature.inputs, signature.outputs = [t.TensorMapT()], [t.TensorMapT()]
            signature.inputs[0].name, signature.inputs[0].tensorIndex = "x", 0
            signature.outputs[0].name, signature.outputs[0].tensorIndex = "y", 1
            model.signatureDefs.append(signature)
    builder = flatbuffers.Builder(0)
    builder.Finish(model.Pack(builder), b"TFL3")
    path.write_bytes(bytes(builder.Output()))
    return path


def test_every_entry_point_of_a_tflite_file_is_read(tmp_path: Path) -> None:
    graphs = read_graphs(two_entries(tmp_path / "two.tflite"))

    assert [(graph.name, graph.nodes[0].op, graph.inputs[0].shape) for graph in graphs] == [
        ("two first", "relu", (2, 3)),
        ("two second", "neg", (4, 5)),
    ]


def test_a_bundle_is_read_program_by_program(exported: Callable[[str], Any]) -> None:
    bundle = exported("onnxruntime")

    graphs = read_graphs(bundle.folder)

    assert [graph.name for graph in graphs] == [p.spec.name for p in bundle.manifest.programs]
    for graph, entry in zip(graphs, bundle.manifest.programs, strict=True):
        assert [(v.name, v.shape) for v in graph.inputs] == [
            (t.name, t.shape) for t in entry.spec.inputs
        ]


# Unusual ones --------------------------------------------------------------------------------------


def rules(graph: Graph) -> set[str]:
    return {kind.rule for kind in check_graph(graph, NPU).findings}


def test_dynamic_shapes_are_named_in_every_format(tmp_path: Path) -> None:
    n = torch.export.Dim("n", min=2, max=9)
    exported = torch.export.export(
        nn.Linear(4, 4), (torch.rand(3, 4),), dynamic_shapes=({0: n},), strict=False
    )
    torch.export.save(exported, tmp_path / "a.pt2")
    onnx.save(onnx_model(dynamic=True), tmp_path / "b.onnx")
    data = tflite_file([T((-1, 4)), T((-1, 4))], [Op("TANH", [0], [1])], [0], [1])
    (tmp_path / "c.tflite").write_bytes(data)

    for file in sorted(tmp_path.iterdir()):
        (graph,) = read_graphs(file)
        assert "WP204" in rules(graph), file
        assert cost_of(graph).uncounted > 0


def test_custom_operators_are_named_in_every_format(tmp_path: Path) -> None:
    @torch.library.custom_op("whisperport_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    @twice.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    class Custom(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return twice(x)

    exported = torch.export.export(Custom(), (torch.rand(3),), strict=False)
    torch.export.save(exported, tmp_path / "a.pt2")
    info = helper.make_tensor_value_info
    onnx_graph = helper.make_graph(
        [helper.make_node("Twice", ["x"], ["y"], domain="com.vendor")],
        "g",
        [info("x", TensorProto.FLOAT, [3])],
        [info("y", TensorProto.FLOAT, [3])],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.vendor", 1)]
    onnx.save(helper.make_model(onnx_graph, opset_imports=opsets), tmp_path / "b.onnx")
    vendor = tflite_file([T((3,)), T((3,))], [Op("Twice", [0], [1], custom=True)], [0], [1])
    (tmp_path / "c.tflite").write_bytes(vendor)

    for file in sorted(tmp_path.iterdir()):
        (graph,) = read_graphs(file)
        (kind,) = (k for k in check_graph(graph, NPU).findings if k.rule == "WP102")
        assert "wice is a custom operator" in kind.occurrences[0].reason


# Wrong ones ----------------------------------------------------------------------------------------


def repacked(source: Path, target: Path, change: Callable[[Any], None]) -> Path:
    """A copy of a .pt2 with its JSON changed."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename.endswith("models/model.json"):
                program = json.loads(data)
                change(program)
                data = json.dumps(program).encode()
            new.writestr(entry, data)
    return target


def test_a_pt2_of_another_torch_says_which(pt2: Path, tmp_path: Path) -> None:
    def change(program: Any) -> None:
        program["schema_version"]["major"] = 9
        program["torch_version"] = "3.1.0"

    with pytest.raises(ProgramError, match=r"unsupported torch version, 3\.1\.0"):
        read_graphs(repacked(pt2, tmp_path / "other.pt2", change))


def test_a_pt2_of_the_former_layout_says_so(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "old.pt2", "w") as archive:
        archive.writestr("serialized_exported_program.json", "{}")

    with pytest.raises(ProgramError, match=r"torch 2\.7 or earlier"):
        read_graphs(tmp_path / "old.pt2")


def test_an_archive_that_unpacks_to_more_than_any_graph_is_not_unpacked(tmp_path: Path) -> None:
    with (
        zipfile.ZipFile(tmp_path / "bomb.pt2", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("bomb/models/model.json", "w", force_zip64=True) as entry,
    ):
        for _ in range(300):
            entry.write(bytes(1 << 20))

    with pytest.raises(ProgramError, match="limit"):
        read_graphs(tmp_path / "bomb.pt2")


@pytest.mark.parametrize("location", ["w.bin", "../w.bin", "/etc/passwd"])
def test_external_data_that_is_not_beside_the_model_is_named(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "w.bin").write_bytes(bytes(10_000))
    path = folder / "model.onnx"
    onnx.save(onnx_model(), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    (folder / "w.bin").unlink()
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    path.write_bytes(model.SerializeToString())

    with pytest.raises(ProgramError, match="external data") as raised:
        read_graphs(path)
    assert repr(location) in raised.value.why


@pytest.mark.parametrize("text", [b"w.bin", b"offset"])
def test_a_place_of_external_data_that_is_not_utf_8_is_an_error(
    tmp_path: Path, text: bytes
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(onnx_model(), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    path.write_bytes(path.read_bytes().replace(text, b"\xff" + text[1:]))

    with pytest.raises(ProgramError, match="is damaged"):
        read_graphs(path)


def test_external_data_that_was_cut_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(onnx_model(), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").write_bytes((tmp_path / "w.bin").read_bytes()[:1000])

    with pytest.raises(ProgramError, match="incomplete"):
        read_graphs(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"hello, world", "not a program of a known format"),
        ("a.onnx", b"hello, world", "damaged, or is not an ONNX model"),
        ("a.onnx", b"", "a.onnx is empty"),
        ("a.onnx", b"\x08\x0a", "damaged, or is not an ONNX model"),
        ("a.onnx", b"\x08\x0a\x3a\x05", "a.onnx is cut off"),
        ("a.onnx", b"\x08\x0a\x3a", "a.onnx is cut off"),
        ("a.pt2", b"PK\x03\x04" + bytes(50), "damaged"),
        ("a.pte", b"\0\0\0\0ET12" + bytes(50), "already compiled"),
        ("a.tflite", b"\x1c\0\0\0TFL3" + bytes(50), "damaged, or is not a TFLite model"),
        ("a.tflite", b"\xff\xff\xff\xffTFL3" + b"\xff" * 50, "damaged, or is not a TFLite model"),
        ("a.bin", b"", "not a program of a known format"),
    ],
)
def test_what_is_no_program_is_rejected(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ProgramError, match=message):
        read_graphs(tmp_path / name)


def test_a_path_that_is_not_there_and_a_folder_that_is_no_bundle_are_rejected(
    tmp_path: Path,
) -> None:
    with pytest.raises(ProgramError, match="cannot read a program"):
        read_graphs(tmp_path / "none.onnx")
    with pytest.raises(ProgramError, match="is not a bundle"):
        read_graphs(tmp_path)


def test_a_bundle_of_compiled_programs_points_to_inspect(exported: Callable[[str], Any]) -> None:
    with pytest.raises(ProgramError, match="already compiled") as raised:
        read_graphs(exported("xnnpack").folder)
    assert "whisperport inspect" in raised.value.hint


# Noise ---------------------------------------------------------------------------------------------

FUZZ = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
DAMAGE = st.tuples(
    st.floats(0, 1), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=6)
)


def read_damaged(source: Path, folder: Path, damage: Any) -> None:
    """Truncate a file or change its bytes: it is read or rejected, without another exception."""
    kept, changes = damage
    data = bytearray(source.read_bytes())
    data = data[: max(1, round(len(data) * (0.5 + kept)))]
    for place, byte in changes:
        data[min(len(data) - 1, int(place * len(data)))] = byte
    path = folder / f"damaged{source.suffix}"
    path.write_bytes(data)
    with contextlib.suppress(ProgramError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for graph in read_graphs(path):
            check_graph(graph, NPU)


@FUZZ
@given(DAMAGE)
def test_damaged_pt2_files_are_read_or_rejected(pt2: Path, tmp_path: Path, damage: Any) -> None:
    read_damaged(pt2, tmp_path, damage)


@FUZZ
@given(DAMAGE)
def test_damaged_onnx_files_are_read_or_rejected(
    onnx_file: Path, tmp_path: Path, damage: Any
) -> None:
    read_damaged(onnx_file, tmp_path, damage)


@FUZZ
@given(DAMAGE)
def test_damaged_tflite_files_are_read_or_rejected(
    tflite: Path, tmp_path: Path, damage: Any
) -> None:
    read_damaged(tflite, tmp_path, damage)


@FUZZ
@given(st.data())
def test_a_pt2_of_wrong_values_is_read_or_rejected(pt2: Path, tmp_path: Path, data: Any) -> None:
    """A whole archive, in which one place of the JSON holds something else."""

    def change(program: Any) -> None:
        place, parent, key = program, None, None
        while isinstance(place, dict | list) and place:
            keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
            parent, key = place, data.draw(st.sampled_from(keys))
            place = place[key]
            if data.draw(st.integers(0, 5)) == 0:
                break
        parent[key] = data.draw(st.sampled_from([None, -1, 2**70, "x", [], {}, [[]], True, 0.5]))

    path = repacked(pt2, tmp_path / "wrong.pt2", change)
    with contextlib.suppress(ProgramError):
        for graph in read_graphs(path):
            check_graph(graph, NPU)
