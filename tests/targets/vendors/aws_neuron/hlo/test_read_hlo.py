"""HLO modules are read as XLA wrote them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whisperport.model.inspection.cost import cost_of
from whisperport.model.inspection.graph import Graph, Node

from .read_hlo import MODULE, UNBOUNDED, Hlo, read_hlo
from .traced_hlo import broken, copied_caches, projected_again, weight_inputs

FOLDER = Path(__file__).parent / "modules"
F32, S64, TUPLE = 11, 5, 13


def stored(name: str) -> Any:
    """A module of this folder, as a message that can be changed."""
    return MODULE.FromString((FOLDER / f"{name}.hlo.pb").read_bytes())


class Written:
    """A module in the making."""

    def __init__(self) -> None:
        self.module = MODULE(name="written")
        self._ids = 0

    def computation(self, name: str = "main") -> Any:
        """Add a computation; the last one is the entry."""
        self._ids += 1
        made = self.module.computations.add(name=name, id=self._ids)
        self.module.entry_computation_id = made.id
        return made

    def add(
        self,
        computation: Any,
        opcode: str,
        operands: Sequence[Any] = (),
        shape: Sequence[int] = (2, 3),
        **fields: Any,
    ) -> Any:
        """Add an instruction, which becomes the root; `shape` is float32."""
        self._ids += 1
        ids = [one.id for one in operands]
        made = computation.instructions.add(
            name=f"{opcode}.{self._ids}", opcode=opcode, id=self._ids, operand_ids=ids
        )
        made.shape.element_type = F32
        made.shape.dimensions.extend(shape)
        for name, value in fields.items():
            if isinstance(value, list):
                getattr(made, name).extend(value)
            else:
                setattr(made, name, value)
        computation.root_id = made.id
        return made

    def tuple_of(self, computation: Any, operands: Sequence[Any]) -> Any:
        made = self.add(computation, "tuple", operands, ())
        made.shape.element_type = TUPLE
        for one in operands:
            made.shape.tuple_shapes.add().CopyFrom(one.shape)
        return made


def calls(depth: int, per_level: int) -> Any:
    """A module whose every computation calls the one before it several times."""
    written = Written()
    for level in range(depth):
        computation = written.computation(f"level_{level}")
        x = written.add(computation, "parameter")
        if not level:
            written.add(computation, "negate", [x])
        for _ in range(per_level if level else 0):
            callee = written.module.computations[level - 1].id
            x = written.add(computation, "call", [x], called_computation_ids=[callee])
    return written.module


def stored_module(name: str) -> Hlo:
    return read_hlo((FOLDER / f"{name}.hlo.pb").read_bytes())


def read(name: str) -> Graph:
    return stored_module(name).graph


def nodes(graph: Graph, op: str) -> list[Node]:
    return [node for node in graph.nodes if node.op == op]


# What XLA wrote ------------------------------------------------------------------------------------


def test_parameters_aliases_and_outputs_are_read() -> None:
    module = stored_module("cached_step")
    graph = module.graph

    assert [(v.name, v.shape, v.dtype) for v in graph.inputs] == [
        ("x.1", (1, 16), "float32"),
        ("position.1", (), "int32"),
        ("cache.1", (8, 16), "float32"),
        ("key.1", (16, 16), "float32"),
        ("query.1", (16, 16), "float32"),
        ("bias.1", (16,), "float32"),
    ]
    assert [v.shape for v in graph.outputs] == [(1, 16), (8, 16)]
    assert module.aliases == {1: "cache.1"}
    assert stored_module("copied_cache").aliases == {}


def test_a_dot_states_its_axes_and_its_cost_is_that_of_the_matmul() -> None:
    dots = nodes(read("cached_step"), "matmul")

    shapes = [([v.shape for v in dot.tensors], dot.output.shape) for dot in dots]
    assert shapes == [
        ([(1, 16), (16, 16)], (1, 16)),  # query
        ([(1, 16), (16, 16)], (1, 16)),  # key
        ([(1, 16), (16, 8)], (1, 8)),  # scores
        ([(1, 8), (8, 16)], (1, 16)),
    ]
    costs = {counted.node.name: counted.flops for counted in cost_of(read("cached_step")).nodes}
    assert [costs[dot.name] for dot in dots] == [2 * 16 * 16, 2 * 16 * 16, 2 * 16 * 8, 2 * 8 * 16]


def test_the_cost_of_a_dot_does_not_depend_on_the_order_of_its_axes() -> None:
    written = Written()
    entry = written.computation()
    left = written.add(entry, "parameter", shape=(5, 7))
    right = written.add(entry, "parameter", shape=(9, 5), parameter_number=1)
    dot = written.add(entry, "dot", [left, right], (7, 9))
    dot.dot.lhs_contracting.append(0)
    dot.dot.rhs_contracting.append(1)

    assert cost_of(read_hlo(written.module.SerializeToString()).graph).flops == 2 * 7 * 9 * 5


def test_operators_that_name_computations_are_read() -> None:
    graph = read("operators")

    assert [n.original_op for n in graph.nodes if n.op == "reduce"] == ["reduce"]  # argmax: of two
    assert nodes(graph, "while")[0].outputs[0].name.endswith("[0]")
    assert len(nodes(graph, "conditional")) == len(nodes(graph, "sort")) == 1
    (conv,) = nodes(graph, "conv")
    assert conv.tensors[1].shape == (6, 4, 3)  # output channels first
    assert conv.output.shape == (1, 6, 6)
    assert {n.op for n in read("cached_step").nodes} >= {"amax", "sum", "le", "lt", "slice_scatter"}


def test_calls_are_inlined_each_under_its_own_name() -> None:
    graph = read_hlo(calls(depth=3, per_level=2).SerializeToString()).graph

    assert [node.op for node in graph.nodes] == ["neg"] * 4
    assert len({node.name for node in graph.nodes}) == 4
    for before, after in zip(graph.nodes, graph.nodes[1:], strict=False):
        assert after.tensors == before.outputs


def test_tuples_are_taken_apart_and_aliases_name_their_elements() -> None:
    written = Written()
    entry = written.computation()
    given = written.add(entry, "parameter", shape=())
    given.shape.element_type = TUPLE
    for size in (2, 4):
        inner = given.shape.tuple_shapes.add(element_type=F32)
        inner.dimensions.append(size)
    second = written.add(entry, "get-tuple-element", [given], (4,), tuple_index=1)
    barrier = written.add(entry, "opt-barrier", [second], (4,))
    made = written.add(entry, "negate", [barrier], (4,))
    written.tuple_of(entry, [written.tuple_of(entry, [made]), second])
    alias = written.module.input_output_alias.entries.add(output_shape_index=[0, 0])
    alias.parameter_shape_index.append(1)

    module = read_hlo(written.module.SerializeToString())
    graph = module.graph

    assert [v.shape for v in graph.inputs] == [(2,), (4,)]
    assert [v.name for v in graph.nodes[0].tensors] == [graph.inputs[1].name]
    assert graph.outputs == (graph.nodes[0].output, graph.inputs[1])
    assert module.aliases == {0: graph.inputs[1].name}


def test_dynamic_axes_and_int64_are_found() -> None:
    module = stored("cached_step")
    entry = module.computations[-1]
    position = next(one for one in entry.instructions if one.name == "position.1")
    position.shape.element_type = S64
    x = next(one for one in entry.instructions if one.name == "x.1")
    x.shape.is_dynamic[:] = [1, 0]
    bias = next(one for one in entry.instructions if one.name == "bias.1")
    bias.shape.is_dynamic[:] = [1]
    bias.shape.dimensions[0] = UNBOUNDED

    graph = read_hlo(module.SerializeToString()).graph

    assert [v.shape for v in graph.inputs][::5] == [("<=1", 16), ("?",)]
    assert broken(graph, "WP204")[0].startswith("input of shape (<=1, 16); ")
    assert any("int64" in reason for reason in broken(graph, "WP203", frozenset({"float32"})))
    assert not broken(read("cached_step"), "WP204")


# What the rules find in it -------------------------------------------------------------------------


def test_inputs_of_an_hlo_module_that_are_weights_are_told_from_others() -> None:
    assert weight_inputs(stored_module("cached_step")) == {"key.1", "query.1", "bias.1"}
    assert weight_inputs(stored_module("projected_step")) == {"key.1", "value.1", "query.1"}
    assert weight_inputs(stored_module("operators")) == {"kernel.1"}


def test_a_projection_of_audio_per_token_is_found_with_its_cost() -> None:
    reasons = projected_again(stored_module("projected_step"))

    assert reasons == 2 * [
        "matmul (1500, 16) by (16, 16) reads only `xa.1`, which is the same for every token of a window: "
        "0.00077 GFLOP and 0.193 MB per token; all 2 of `xa.1`: 0.00154 GFLOP and 0.386 MB"
    ]
    assert not projected_again(stored_module("cached_step"))


def test_an_unused_parameter_is_found() -> None:
    assert broken(read("projected_step"), "WP602") == [
        "input of shape (1, 1500, 16), 0.10 MB per call: nothing reads it"
    ]
    assert not broken(read("cached_step"), "WP602")


def test_a_cache_without_an_alias_is_found() -> None:
    assert copied_caches(stored_module("copied_cache")) == ["cache.1"]
    assert not copied_caches(stored_module("cached_step"))


def test_a_cache_whose_memory_another_output_takes_is_found() -> None:
    written = Written()
    entry = written.computation()
    caches = [written.add(entry, "parameter", parameter_number=n) for n in range(2)]
    row = written.add(entry, "constant", shape=(1, 3))
    made = [written.add(entry, "dynamic-update-slice", [cache, row]) for cache in caches]
    written.tuple_of(entry, made)
    entries = written.module.input_output_alias.entries
    for output, parameter in ((0, 1), (1, 0)):
        entries.add(output_shape_index=[output], parameter_number=parameter)

    assert len(copied_caches(read_hlo(written.module.SerializeToString()))) == 2
    for entry in entries:
        entry.parameter_number = 1 - entry.parameter_number
    assert not copied_caches(read_hlo(written.module.SerializeToString()))


def test_a_cache_that_is_returned_unchanged_is_found() -> None:
    written = Written()
    entry = written.computation()
    x = written.add(entry, "parameter")
    written.tuple_of(entry, [written.add(entry, "negate", [x]), x])

    assert copied_caches(read_hlo(written.module.SerializeToString())) == [x.name]
