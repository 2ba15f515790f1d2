"""No constant of a decode program depends on N; a graph that may depend on it otherwise stays as it is."""

from collections.abc import Callable, Mapping
from typing import Any

import onnx
import onnx_ir as ir
import pytest

from whisperport.model.trace.onnx import to_onnx
from whisperport.model.trace.onnx_cache_length import free_cache_length
from whisperport.program.bundle.onnx_graph import CACHED, CACHED_AND_NEW

from ...micro import DIMS

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
