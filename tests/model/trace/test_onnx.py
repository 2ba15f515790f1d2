"""ONNX files of programs: each weight once, halved where nothing is lost, no constant that depends on N."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnxscript._internal.values import TracedOnnxFunction
from torch import Tensor, nn

from whisperport.errors import LoweringError
from whisperport.model.trace import onnx as onnx_module
from whisperport.model.trace.onnx import ALIGNMENT, OPSET, SharedWeights, to_onnx, write_onnx
from whisperport.model.trace.onnx_cache_length import free_cache_length
from whisperport.model.trace.program import Program, trace
from whisperport.program.bundle.onnx_graph import CACHED, CACHED_AND_NEW

from ...micro import DIMS


def read_back(path: Path, offset: int, like: np.ndarray) -> np.ndarray:
    with path.open("rb") as file:
        file.seek(offset)
        return np.frombuffer(file.read(like.nbytes), like.dtype).reshape(like.shape)


@given(sizes=st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3)), min_size=1, max_size=8))
@settings(max_examples=30)
def test_whatever_is_placed_is_found_again_aligned_and_equal_ones_once(
    sizes: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("shared") / "weights.bin"
    weights = SharedWeights(path)
    arrays = [np.full(size, seed, np.float32) for size, seed in sizes]

    placed = [weights.store(array, ir.DataType.FLOAT, "w") for array in arrays]

    for array, tensor in zip(arrays, placed, strict=True):
        assert tensor.offset is not None
        assert tensor.offset % ALIGNMENT == 0
        assert tensor.length == array.nbytes
        np.testing.assert_array_equal(read_back(path, tensor.offset, array), array)
    distinct = {(array.size, float(array[0])) for array in arrays}
    assert len({tensor.offset for tensor in placed}) == len(distinct)


def linear(weight: Tensor) -> Program:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.weight.data = weight
    return trace("linear", module, (torch.zeros(1, weight.shape[1]),), ["y"])


def run(path: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(["y"], {"input": x})[0]


def test_weights_that_are_float16_are_stored_so_and_lose_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    exact = torch.randn(64, 128).half().float()
    x = np.random.default_rng(0).standard_normal((1, 128)).astype(np.float32)
    half, full = SharedWeights(tmp_path / "half.bin"), SharedWeights(tmp_path / "full.bin")

    write_onnx(linear(exact), tmp_path / "half.onnx", half)
    write_onnx(linear(exact + 1e-6), tmp_path / "full.onnx", full)

    assert half.path.stat().st_size == exact.numel() * 2
    assert full.path.stat().st_size == exact.numel() * 4
    np.testing.assert_allclose(run(tmp_path / "half.onnx", x)[0], exact @ x[0], atol=1e-5)


@pytest.mark.parametrize("value", [1e5, 1e-9, np.pi], ids=["too large", "too small", "too fine"])
def test_one_weight_that_float16_cannot_hold_keeps_all_in_float32(
    tmp_path: Path, value: float
) -> None:
    weight = torch.ones(64, 128)
    weight[3, 5] = value
    weights = SharedWeights(tmp_path / "weights.bin")

    write_onnx(linear(weight), tmp_path / "linear.onnx", weights)

    assert weights.path.stat().st_size == weight.numel() * 4
    y = run(tmp_path / "linear.onnx", np.eye(128, dtype=np.float32)[5:6])
    assert y[0, 3] == np.float32(value)


def test_an_opset_that_torch_cannot_write_is_rejected(tmp_path: Path) -> None:
    weights = SharedWeights(tmp_path / "weights.bin")

    with pytest.raises(LoweringError, match=r"opset"):
        write_onnx(linear(torch.ones(2, 2)), tmp_path / "linear.onnx", weights, opset=5)


def test_an_operator_that_onnx_lacks_is_named(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.bessel_j0(x)

    program = trace("odd", Odd(), (torch.zeros(2, 3),), ["y"])

    with pytest.raises(LoweringError, match=f"`odd` cannot be written as ONNX opset {OPSET}") as no:
        write_onnx(program, tmp_path / "odd.onnx", SharedWeights(tmp_path / "weights.bin"))

    assert "bessel_j0" in no.value.why + no.value.hint


def test_a_program_that_hands_an_input_through_keeps_its_names(tmp_path: Path) -> None:
    class Through(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x + 1

    program = trace("through", Through(), (torch.zeros(1, 3),), ["again", "more"])
    write_onnx(program, tmp_path / "p.onnx", SharedWeights(tmp_path / "weights.bin"))

    session = onnxruntime.InferenceSession(str(tmp_path / "p.onnx"))
    again, more = session.run(["again", "more"], {"x": np.ones((1, 3), np.float32)})

    assert again.tolist() == [[1, 1, 1]]
    assert more.tolist() == [[2, 2, 2]]


def test_the_exporter_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_onnx(linear(torch.ones(2, 2)), tmp_path / "l.onnx", SharedWeights(tmp_path / "w.bin"))

    assert capfd.readouterr() == ("", "")


def test_written_twice_is_the_same_to_the_byte(tmp_path: Path) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))

    def write(folder: Path) -> tuple[bytes, bytes]:
        folder.mkdir()
        weights = SharedWeights(folder / "weights.bin")
        write_onnx(linear(weight), folder / "l.onnx", weights)
        return (folder / "l.onnx").read_bytes(), weights.path.read_bytes()

    make: Callable[[Path], tuple[bytes, bytes]] = write
    assert make(tmp_path / "a") == make(tmp_path / "b")


def test_the_functions_of_torch_are_parsed_once_and_the_bytes_are_those_of_torch_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = [
        (module, name, getattr(module, name)) for module, name in onnx_module._parsing_functions()
    ]
    parsed: list[str] = []
    function_ir = TracedOnnxFunction.function_ir.fget
    assert function_ir is not None
    monkeypatch.setattr(
        TracedOnnxFunction,
        "function_ir",
        property(lambda function: (parsed.append(function.name), function_ir(function))[1]),
    )
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Softmax(-1)).eval()
    program = trace("some", module, (torch.zeros(1, 4),))
    first = to_onnx(program)
    parsed.clear()

    again = to_onnx(program)

    assert len(places) == 2
    assert parsed == []
    assert all(getattr(module, name) is found for module, name, found in places)
    with monkeypatch.context() as patch:
        patch.setattr(onnx_module, "_parsing_functions", list)
        alone = to_onnx(program)
    assert len(parsed) > 400
    written = [ir.to_proto(one).SerializeToString() for one in (first, again, alone)]
    assert written == written[:1] * 3


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return torch.relu(y) * 2, y * 3


def test_an_output_may_have_the_name_of_an_inner_value(tmp_path: Path) -> None:
    program = trace("twice", Twice(), (torch.zeros(1, 4),), ["add", "relu"])
    write_onnx(program, tmp_path / "twice.onnx", SharedWeights(tmp_path / "weights.bin"))
    x = np.array([[-2.0, -0.5, 0.0, 3.0]], np.float32)

    session = onnxruntime.InferenceSession(
        str(tmp_path / "twice.onnx"), providers=["CPUExecutionProvider"]
    )
    add, relu = session.run(["add", "relu"], {"x": x})

    np.testing.assert_array_equal(add, np.maximum(x + 1, 0) * 2)
    np.testing.assert_array_equal(relu, (x + 1) * 3)


NAMES = ["step", "prefill_4", "align", "step_2"]
N = DIMS.n_text_ctx


@pytest.fixture(scope="module")
def graphs(micro_programs: tuple[Any, ...], micro_batch_step: Any) -> Mapping[str, bytes]:
    """The decode programs of the micro model as ONNX files."""
    programs = {program.name: program for program in (*micro_programs, micro_batch_step)}
    return {name: ir.to_proto(to_onnx(programs[name])).SerializeToString() for name in NAMES}


def read(content: bytes) -> ir.Graph:
    return ir.from_proto(onnx.ModelProto.FromString(content)).graph


def written(graph: ir.Graph) -> bytes:
    return ir.to_proto(graph).SerializeToString(deterministic=True)


@pytest.mark.parametrize("name", NAMES)
def test_constants_name_no_length_and_axes_are_denoted(
    graphs: Mapping[str, bytes], name: str
) -> None:
    graph = read(graphs[name])
    width = next(value for value in graph.inputs if value.name == "mask").shape[2]

    assert free_cache_length(graph)

    shapes = [value.const_value for value in graph.initializers.values()]
    integers = [one.numpy() for one in shapes if one.dtype == ir.DataType.INT64]
    assert not [array for array in integers if N in array or width in array]
    values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    expected = {N: CACHED, width: CACHED_AND_NEW}
    for value in values:
        denoted = [value.shape.get_denotation(axis) for axis in range(len(value.shape))]
        assert denoted == [expected.get(size) for size in value.shape.numpy()], value.name


def node_of(graph: Any, kind: str) -> Any:
    return next(node for node in graph.node if node.op_type == kind)


def read_twice(graph: Any) -> None:
    graph.node.add(op_type="Identity", input=["self_k_0"], output=["copy"])


def values_read_twice(graph: Any) -> None:
    graph.node.add(op_type="Identity", input=["self_v_1"], output=["copy"])


def probabilities_returned(graph: Any) -> None:
    graph.output.add(name=node_of(graph, "Softmax").output[0])


def mask_used_elsewhere(graph: Any) -> None:
    graph.node.add(op_type="Identity", input=["mask"], output=["copy"])


def another_axis(graph: Any) -> None:
    node_of(graph, "Softmax").attribute[0].i = 1


def another_operator(graph: Any) -> None:
    node_of(graph, "Softmax").op_type = "LogSoftmax"


def another_slice(graph: Any) -> None:
    node_of(graph, "Slice").input[2] = node_of(graph, "Slice").input[1]


def other_steps(graph: Any) -> None:
    node_of(graph, "Slice").input[4] = node_of(graph, "Slice").input[2]


def a_slice_of_the_default_axes(graph: Any) -> None:
    del node_of(graph, "Slice").input[3:]


def keys_after_the_new_ones(graph: Any) -> None:
    concat = node_of(graph, "Concat")
    concat.input[:] = list(concat.input)[::-1]


def no_mask(graph: Any) -> None:
    add = next(node for node in graph.node if "mask" in node.input)
    add.input[:] = [name if name != "mask" else "x" for name in add.input]


def a_mask_of_four_axes(graph: Any) -> None:
    mask = next(value for value in graph.input if value.name == "mask")
    mask.type.tensor_type.shape.dim.add(dim_value=1)


def no_caches(graph: Any) -> None:
    for value in graph.input:
        value.name = value.name.replace("self_", "other_")
    for node in graph.node:
        node.input[:] = [name.replace("self_", "other_") for name in node.input]


def an_inner_graph(graph: Any) -> None:
    branch = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["self_k_0"], ["y"])], "g", [], []
    )
    graph.node.append(onnx.helper.make_node("If", [], [], then_branch=branch))


@pytest.mark.parametrize("name", ["step", "step_2"])
@pytest.mark.parametrize(
    "change",
    [
        read_twice,
        values_read_twice,
        probabilities_returned,
        mask_used_elsewhere,
        another_axis,
        another_operator,
        another_slice,
        other_steps,
        a_slice_of_the_default_axes,
        keys_after_the_new_ones,
        no_mask,
        a_mask_of_four_axes,
        no_caches,
        an_inner_graph,
    ],
)
def test_a_graph_of_another_form_is_not_changed(
    graphs: Mapping[str, bytes], name: str, change: Callable[[Any], None]
) -> None:
    model = onnx.ModelProto.FromString(graphs[name])
    change(model.graph)
    graph = ir.from_proto(model).graph
    before = written(graph)

    assert not free_cache_length(graph)

    assert written(graph) == before
