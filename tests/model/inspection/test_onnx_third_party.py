"""ONNX files of third-party exporters: computed shapes, every form of constant, functions, sequences."""

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from whisperport.errors import ProgramError
from whisperport.model.inspection.graph import Graph
from whisperport.model.inspection.onnx_shapes import with_shapes
from whisperport.model.inspection.read_onnx import read_onnx
from whisperport.model.inspection.rejections import check_graph
from whisperport.targets import get_target

ORT = get_target("onnxruntime").spec
X = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])


def written(
    path: Path, nodes: list[Any], outputs: list[Any], inputs: Any = (X,), **more: Any
) -> Path:
    domains = (
        {"": 18, "my": 1} if "functions" in more else {"": 18, "vendor": 1, "com.microsoft": 1}
    )
    stored = more.pop("stored", [])
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs, stored),
        opset_imports=[helper.make_opsetid(name, n) for name, n in domains.items()],
        ir_version=10,
        **more,
    )
    onnx.save(model, path)
    return path


def out(name: str, shape: Any = None, kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def kinds(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


class Recurrent(nn.Module):
    """What TorchScript's exporter writes with states of zeros, whose shapes it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gru = nn.Conv1d(8, 16, 3, 2, 1), nn.GRU(16, 12, batch_first=True)

    def forward(self, x: Any) -> Any:
        found, _ = self.gru(nn.functional.gelu(self.conv(x)).transpose(1, 2))
        return found


class Attention(nn.Module):
    """torch's own layer, which computes queries, keys and values in one matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


STRANGERS = {
    "attention": (Attention, (1, 5, 16)),
    "recurrent": (Recurrent, (1, 8, 20)),
}


@pytest.fixture(scope="module", params=[("attention", 17), ("recurrent", 9), ("recurrent", 18)])
def torchscript(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, opset = request.param
    make, shape = STRANGERS[name]
    path = tmp_path_factory.mktemp("torchscript") / f"{name}.onnx"
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch.onnx.export(
            make().eval(), (torch.randn(shape),), str(path), dynamo=False, opset_version=opset
        )
        logging.disable(logging.NOTSET)
    return path


def test_shapes_that_torchscript_computes_are_known_and_right(torchscript: Path) -> None:
    graph = read_onnx(torchscript)
    model = onnx.load(torchscript)
    named = {value.name: value.shape for node in graph.nodes for value in node.outputs}
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in named)

    session = onnxruntime.InferenceSession(model.SerializeToString())
    (given,) = session.get_inputs()
    met = session.run(list(named), {given.name: np.zeros(given.shape, np.float32)})

    assert dict(named) == {name: array.shape for name, array in zip(named, met, strict=True)}


def test_a_static_model_of_torchscript_has_no_dynamic_shape(torchscript: Path) -> None:
    graph = read_onnx(torchscript)

    assert check_graph(graph, ORT).findings == ()
    assert not {"shape", "full"} & set(kinds(graph))


def test_a_dynamic_axis_stays_dynamic(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("ConstantOfShape", ["s"], ["z"]),
        helper.make_node("Add", ["x", "z"], ["y"]),
    ]

    checked = check_graph(read_onnx(written(tmp_path / "d.onnx", nodes, [out("y")], (x,))), ORT)

    assert {kind.rule for kind in checked.findings} == {"WP204"}


@pytest.mark.parametrize(
    ("form", "value", "shape"),
    [
        ("value_float", 2.0, ()),
        ("value_floats", [2.0, 3.0, 4.0], (3,)),
        ("value_int", 2, ()),
        ("value_ints", [1, 2, 3], (3,)),
        ("value", helper.make_tensor("c", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0]), (3,)),
    ],
)
def test_constants_of_every_form_are_constants(
    tmp_path: Path, form: str, value: Any, shape: tuple[int, ...]
) -> None:
    nodes = [
        helper.make_node("Constant", [], ["c"], **{form: value}),
        helper.make_node("Cast", ["c"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["x", "f"], ["y"]),
    ]

    (matmul,) = read_onnx(written(tmp_path / "c.onnx", nodes, [out("y", [2, 3])])).nodes

    assert [(v.shape, v.constant) for v in matmul.tensors] == [((2, 3), False), (shape, True)]


def test_local_functions_are_read_as_what_they_are_made_of(tmp_path: Path) -> None:
    gate = helper.make_function(
        "my",
        "Gate",
        ["a"],
        ["c"],
        [helper.make_node("Sigmoid", ["a"], ["s"]), helper.make_node("Mul", ["a", "s"], ["c"])],
        [helper.make_opsetid("", 18)],
    )
    nodes = [helper.make_node("Gate", ["x"], ["y"], domain="my")]

    graph = read_onnx(written(tmp_path / "f.onnx", nodes, [out("y", [2, 3])], functions=[gate]))

    assert kinds(graph) == ["sigmoid", "mul"]
    assert check_graph(graph, ORT).findings == ()


def branch(name: str, *nodes: Any) -> Any:
    return helper.make_graph(nodes, name, [], [out(f"{name}_y", [2, 3])])


def test_what_only_a_branch_reads_is_kept_and_its_custom_operators_are_named(
    tmp_path: Path,
) -> None:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [3, 3], np.eye(3).flatten().tolist())
    then = branch("then", helper.make_node("Neg", ["h"], ["then_y"]))
    other = branch(
        "other",
        helper.make_node("Mystery", ["x"], ["m"], domain="vendor"),
        helper.make_node("Add", ["m", "h"], ["other_y"]),
    )
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("If", ["c"], ["y"], name="choice", then_branch=then, else_branch=other),
    ]
    inputs = (X, helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    path = written(tmp_path / "if.onnx", nodes, [out("y", [2, 3])], inputs, stored=[weight])

    graph = read_onnx(path)

    assert kinds(graph) == ["matmul", "vendor.Mystery", "If"]
    assert {value.name for value in graph.nodes[-1].tensors} == {"c", "h", "x"}
    (kind,) = check_graph(graph, ORT).findings
    assert (kind.rule, kind.occurrences[0].name) == ("WP102", "choice/0")


def test_beyond_a_custom_operator_shapes_are_unknown_and_not_dynamic(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("FusedGelu", ["x"], ["h"], domain="com.microsoft"),
        helper.make_node("Relu", ["h"], ["y"]),
    ]

    graph = read_onnx(written(tmp_path / "m.onnx", nodes, [out("y")]))

    assert check_graph(graph, ORT).findings == ()
    assert check_graph(graph, ORT).cost.uncounted == 2


def test_a_sequence_is_reported_as_a_sequence(tmp_path: Path) -> None:
    given = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [2, 3])
    nodes = [helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=0)]

    checked = check_graph(read_onnx(written(tmp_path / "s.onnx", nodes, [out("y")], (given,))), ORT)

    reasons = [place.reason for kind in checked.findings for place in kind.occurrences]
    assert any("input of dtype sequence" in reason for reason in reasons)


def test_a_sparse_weight_is_a_weight(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    path = written(tmp_path / "sparse.onnx", nodes, [out("y", [2, 4])])
    model = onnx.load(path)
    values = helper.make_tensor("w", TensorProto.FLOAT, [2], [1.0, 2.0])
    places = helper.make_tensor("i", TensorProto.INT64, [2], [0, 5])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [3, 4]))
    onnx.save(model, path)

    (matmul,) = read_onnx(path).nodes

    assert (matmul.tensors[1].shape, matmul.tensors[1].constant) == ((3, 4), True)


@pytest.mark.parametrize(
    "bomb",
    [
        [helper.make_node("ConstantOfShape", ["huge"], ["y"])],
        [helper.make_node("Range", ["zero", "big", "one"], ["y"])],
    ],
)
def test_a_tensor_of_any_size_is_not_made_because_a_file_asks_for_it(bomb: list[Any]) -> None:
    stored = [
        helper.make_tensor("huge", TensorProto.INT64, [3], [10**6] * 3),
        *(
            helper.make_tensor(name, TensorProto.INT64, [], [n])
            for name, n in (("zero", 0), ("big", 10**12), ("one", 1))
        ),
    ]
    lies = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph(bomb, "g", [], [lies], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])

    with contextlib.suppress(onnx.shape_inference.InferenceError):
        assert [node.op_type for node in with_shapes(model).graph.node] == [bomb[0].op_type]


def doubling(levels: int) -> list[Any]:
    """Functions that call the one before twice each."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("my", 1)]
    calls = [[helper.make_node("Neg", ["a"], ["b"])]]
    for level in range(levels):
        last = {"op_type": f"F{level}", "domain": "my"}
        twice = [helper.make_node(inputs=[i], outputs=[o], **last) for i, o in ("at", "tb")]
        calls.append(twice)
    return [
        helper.make_function("my", f"F{level}", ["a"], ["b"], nodes, opsets)
        for level, nodes in enumerate(calls)
    ]


def test_functions_that_unfold_without_end_are_not_unfolded(tmp_path: Path) -> None:
    nodes = [helper.make_node("F40", ["x"], ["y"], domain="my")]
    path = written(tmp_path / "f.onnx", nodes, [out("y", [2, 3])], functions=doubling(40))

    with pytest.raises(ProgramError) as raised:
        read_onnx(path)

    assert f"expand to {2**40} nodes" in raised.value.why


def branching(levels: int) -> list[Any]:
    """Functions that call the one before in both branches of an If."""
    functions = doubling(levels)
    value = helper.make_tensor("c", TensorProto.BOOL, [], [True])
    for level, function in enumerate(functions[1:]):
        call = helper.make_node(f"F{level}", ["a"], ["t"], domain="my")
        body = helper.make_graph([call], "body", [], [out("t")])
        del function.node[:]
        function.node.append(helper.make_node("Constant", [], ["c"], value=value))
        function.node.append(
            helper.make_node("If", ["c"], ["b"], then_branch=body, else_branch=body)
        )
    return functions


def test_functions_that_unfold_in_branches_are_counted(tmp_path: Path) -> None:
    nodes = [helper.make_node("F18", ["x"], ["y"], domain="my")]
    path = written(tmp_path / "f.onnx", nodes, [out("y", [2, 3])], functions=branching(18))

    with pytest.raises(ProgramError) as raised:
        read_onnx(path)

    assert "local functions expand to" in raised.value.why


@pytest.mark.parametrize("mark", [{"overload": "again"}, {"domain": "ai.onnx"}])
def test_functions_are_found_as_onnx_finds_them(tmp_path: Path, mark: dict[str, str]) -> None:
    functions = doubling(40)
    for level, function in enumerate(functions):
        calls = [function, *(function.node if level else ())]
        for name, value in mark.items():
            for call in calls:
                setattr(call, name, value)
    top = helper.make_node("F40", ["x"], ["y"], **{"domain": "my", **mark})
    if "domain" in mark:
        top.domain = ""  # the same to onnx
    path = written(tmp_path / "f.onnx", [top], [out("y", [2, 3])], functions=functions)

    with pytest.raises(ProgramError) as raised:
        read_onnx(path)

    assert "local functions expand to" in raised.value.why


@pytest.mark.parametrize(
    ("operator", "shapes", "made"),
    [
        ("Max", [[200 if axis == i else 1 for axis in range(4)] for i in range(4)], [200] * 4),
        ("Concat", [[200]] * 2000, [400_000]),
    ],
)
def test_arithmetic_on_small_tensors_that_makes_a_large_one_is_not_done(
    tmp_path: Path, operator: str, shapes: Any, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(*_: Any) -> None:
        raise AssertionError(f"{operator} was computed")

    monkeypatch.setattr("whisperport.model.inspection.onnx_shapes._ShapePass._evaluated", evaluate)
    stored = [
        helper.make_tensor(f"s{i}", TensorProto.FLOAT, shape, np.zeros(shape, np.float32))
        for i, shape in enumerate(shapes)
    ]
    more = {"axis": 0} if operator == "Concat" else {}
    nodes = [helper.make_node(operator, [tensor.name for tensor in stored], ["y"], **more)]

    graph = read_onnx(written(tmp_path / "s.onnx", nodes, [out("y")], stored=stored))

    assert graph.outputs[0].shape == tuple(made)


def test_functions_that_unfold_to_a_few_are(tmp_path: Path) -> None:
    nodes = [helper.make_node("F3", ["x"], ["y"], domain="my")]
    path = written(tmp_path / "f.onnx", nodes, [out("y", [2, 3])], functions=doubling(3))

    assert kinds(read_onnx(path)) == ["neg"] * 8


def test_an_attribute_of_another_type_is_damage(tmp_path: Path) -> None:
    nodes = [helper.make_node("Gelu", ["x"], ["y"], approximate=1)]

    with pytest.raises(ProgramError, match="damaged"):
        read_onnx(written(tmp_path / "g.onnx", nodes, [out("y", [2, 3])]))


def test_nodes_with_equal_names_get_different_names(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Mystery", ["x"], ["h"], "same", domain="vendor"),
        helper.make_node("Mystery", ["h"], ["y"], "same", domain="vendor"),
    ]

    checked = check_graph(read_onnx(written(tmp_path / "n.onnx", nodes, [out("y")])), ORT)

    assert checked.rejected_nodes == 2


@pytest.mark.parametrize(
    ("reads", "returns", "missing"), [("x", "nowhere", "nowhere"), ("gone", "y", "gone")]
)
def test_a_tensor_without_source_is_named(
    tmp_path: Path, reads: str, returns: str, missing: str
) -> None:
    nodes = [helper.make_node("Neg", [reads], ["y"])]

    with pytest.raises(ProgramError) as raised:
        read_onnx(written(tmp_path / "m.onnx", nodes, [out(returns, [2, 3])]))

    assert missing in raised.value.why
