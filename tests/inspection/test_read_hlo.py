"""HLO modules are read as XLA wrote them; damaged ones and other formats are rejected with the reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whisperport.errors import ProgramError
from whisperport.inspection.check import check_graph
from whisperport.inspection.cost import cost_of
from whisperport.inspection.graph import Graph, Node
from whisperport.inspection.lowered import inspect_lowered
from whisperport.inspection.read import read_graphs
from whisperport.inspection.read_hlo_proto import read_module
from whisperport.inspection.read_hlo_values import UNBOUNDED
from whisperport.inspection.rules import RULES
from whisperport.inspection.rules.decoding import weight_inputs
from whisperport.program.profiling import ProfileOptions
from whisperport.program.spec import Limit
from whisperport.targets import get_target

from .hlo_file import F32, FOLDER, S64, TUPLE, Written, calls, stored


def read(name: str) -> Graph:
    (graph,) = read_graphs(FOLDER / f"{name}.hlo.pb")
    return graph


def of(tmp_path: Path, module: Any, name: str = "module.pb") -> Graph:
    path = tmp_path / name
    path.write_bytes(module if isinstance(module, bytes) else module.SerializeToString())
    (graph,) = read_graphs(path)
    return graph


def nodes(graph: Graph, op: str) -> list[Node]:
    return [node for node in graph.nodes if node.op == op]


def found(graph: Graph, code: str, value: Any = None) -> list[str]:
    limit = Limit(rule=code, value=value, source="a test")
    return [finding.reason for finding in RULES[code].check(graph, limit)]


# What XLA wrote ------------------------------------------------------------------------------------


def test_parameters_aliases_and_outputs_are_read() -> None:
    graph = read("cached_step")

    assert (graph.name, graph.format) == ("cached_step", "hlo")
    assert [(v.name, v.shape, v.dtype) for v in graph.inputs] == [
        ("x.1", (1, 16), "float32"),
        ("position.1", (), "int32"),
        ("cache.1", (8, 16), "float32"),
        ("key.1", (16, 16), "float32"),
        ("query.1", (16, 16), "float32"),
        ("bias.1", (16,), "float32"),
    ]
    assert [v.shape for v in graph.outputs] == [(1, 16), (8, 16)]
    assert graph.aliases == {1: "cache.1"}
    assert read("copied_cache").aliases == {}


def test_a_dot_states_its_axes_and_its_cost_is_that_of_the_matmul() -> None:
    dots = nodes(read("cached_step"), "matmul")

    shapes = [([v.shape for v in dot.tensors], dot.output.shape) for dot in dots]
    assert shapes == [
        ([(1, 16), (16, 16)], (1, 16)),  # query
        ([(1, 16), (16, 16)], (1, 16)),  # key
        ([(1, 16), (16, 8)], (1, 8)),  # scores
        ([(1, 8), (8, 16)], (1, 16)),
    ]
    assert dots[0].attributes["lhs_contracting"] == (1,)
    assert dots[0].attributes["rhs_contracting"] == (0,)
    costs = {counted.node.name: counted.flops for counted in cost_of(read("cached_step")).nodes}
    assert [costs[dot.name] for dot in dots] == [2 * 16 * 16, 2 * 16 * 16, 2 * 16 * 8, 2 * 8 * 16]


def test_the_cost_of_a_dot_does_not_depend_on_the_order_of_its_axes(tmp_path: Path) -> None:
    written = Written()
    entry = written.computation()
    left = written.add(entry, "parameter", shape=(5, 7))
    right = written.add(entry, "parameter", shape=(9, 5), parameter_number=1)
    dot = written.add(entry, "dot", [left, right], (7, 9))
    dot.dot.lhs_contracting.append(0)
    dot.dot.rhs_contracting.append(1)

    assert cost_of(of(tmp_path, written.module)).flops == 2 * 7 * 9 * 5


def test_operators_that_name_computations_are_read() -> None:
    graph = read("operators")

    assert [n.original_op for n in graph.nodes if n.op == "reduce"] == ["reduce"]  # argmax: of two
    assert nodes(graph, "while")[0].outputs[0].name.endswith("[0]")
    assert len(nodes(graph, "conditional")) == len(nodes(graph, "sort")) == 1
    (conv,) = nodes(graph, "conv")
    assert conv.attributes == {"groups": 1, "contracted": 4 * 3}
    assert conv.output.shape == (1, 6, 6)
    assert {n.op for n in read("cached_step").nodes} >= {"amax", "sum", "le", "lt", "slice_scatter"}


def test_calls_are_inlined_each_under_its_own_name(tmp_path: Path) -> None:
    graph = of(tmp_path, calls(depth=3, per_level=2))

    assert [node.op for node in graph.nodes] == ["neg"] * 4
    assert len({node.name for node in graph.nodes}) == 4
    for before, after in zip(graph.nodes, graph.nodes[1:], strict=False):
        assert after.tensors == before.outputs


def test_tuples_are_taken_apart_and_aliases_name_their_elements(tmp_path: Path) -> None:
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

    graph = of(tmp_path, written.module)

    assert [v.shape for v in graph.inputs] == [(2,), (4,)]
    assert [v.name for v in graph.nodes[0].tensors] == [graph.inputs[1].name]
    assert graph.outputs == (graph.nodes[0].output, graph.inputs[1])
    assert graph.aliases == {0: graph.inputs[1].name}


def test_a_module_in_a_dump_of_xla_is_the_same_module(tmp_path: Path) -> None:
    """`--xla_dump_hlo_as_proto` writes an HloProto: the module is its field 1."""
    data = (FOLDER / "cached_step.hlo.pb").read_bytes()
    length = bytes([len(data) & 127 | 128, len(data) >> 7])

    for suffix in ("dump.hlo.pb", "dump.bin"):
        graph = of(tmp_path, b"\x0a" + length + data + b"\x1a\x02\x08\x01", suffix)
        assert graph.nodes == read("cached_step").nodes


def test_a_file_is_recognized_by_its_content(tmp_path: Path) -> None:
    graph = of(tmp_path, (FOLDER / "operators.hlo.pb").read_bytes(), "operators.bin")

    assert graph.nodes == read("operators").nodes


def test_what_a_constant_stores_is_not_kept(tmp_path: Path) -> None:
    written = Written()
    entry = written.computation()
    x = written.add(entry, "parameter", shape=(1, 2000))
    constant = written.add(entry, "constant", shape=(1, 2000))
    written.add(entry, "add", [x, constant], (1, 2000))
    literal = b"\x42\xc3\x3e\x42\xc0\x3e" + bytes(8000)  # field 8: a LiteralProto with 2,000 f32s
    constant.MergeFromString(literal)
    (tmp_path / "large.pb").write_bytes(written.module.SerializeToString())

    graph = of(tmp_path, written.module)

    assert [v.constant for v in graph.nodes[0].tensors] == [False, True]
    assert len(read_module(tmp_path / "large.pb").SerializeToString()) < 1000
    assert len(written.module.SerializeToString()) > 8000


def test_dynamic_axes_and_int64_are_found(tmp_path: Path) -> None:
    module = stored("cached_step")
    entry = module.computations[-1]
    position = next(one for one in entry.instructions if one.name == "position.1")
    position.shape.element_type = S64
    x = next(one for one in entry.instructions if one.name == "x.1")
    x.shape.is_dynamic[:] = [1, 0]
    bias = next(one for one in entry.instructions if one.name == "bias.1")
    bias.shape.is_dynamic[:] = [1]
    bias.shape.dimensions[0] = UNBOUNDED

    graph = of(tmp_path, module)

    assert [v.shape for v in graph.inputs][::5] == [("<=1", 16), ("?",)]
    assert found(graph, "WP204")[0].startswith("input of shape (<=1, 16); ")
    assert any("int64" in reason for reason in found(graph, "WP203", frozenset({"float32"})))
    assert not found(read("cached_step"), "WP204")


# What the rules find in it -------------------------------------------------------------------------


def test_a_target_that_does_not_read_hlo_says_so_and_warnings_remain() -> None:
    checked = check_graph(read("projected_step"), get_target("onnxruntime").spec)

    kinds = {group.rule: group.kind for group in checked.findings}
    assert kinds["WP402"] == "rejected"
    assert {code for code, kind in kinds.items() if kind == "warning"} == {"WP601", "WP602"}


def test_inputs_of_an_hlo_module_that_are_weights_are_told_from_others() -> None:
    assert weight_inputs(read("cached_step")) == {"key.1", "query.1", "bias.1"}
    assert weight_inputs(read("projected_step")) == {"key.1", "value.1", "query.1"}
    assert weight_inputs(read("operators")) == {"kernel.1"}


def test_a_projection_of_audio_per_token_is_found_with_its_cost() -> None:
    reasons = found(read("projected_step"), "WP601")

    assert reasons == 2 * [
        "matmul (1500, 16) by (16, 16) reads only `xa.1`, which is the same for every token of a window: "
        "0.00077 GFLOP and 0.193 MB per token; all 2 of `xa.1`: 0.00154 GFLOP and 0.386 MB"
    ]
    assert not found(read("cached_step"), "WP601")


def test_an_unused_parameter_is_found() -> None:
    assert found(read("projected_step"), "WP602") == [
        "input of shape (1, 1500, 16), 0.10 MB per call: nothing reads it"
    ]
    assert not found(read("cached_step"), "WP602")


def test_a_cache_without_an_alias_is_found() -> None:
    assert found(read("copied_cache"), "WP603") == [
        "input of shape (8, 16), 0.000512 MB is returned with a part written over as output 1, which is "
        "not aliased to it"
    ]
    assert not found(read("cached_step"), "WP603")


def test_a_cache_whose_memory_another_output_takes_is_found(tmp_path: Path) -> None:
    written = Written()
    entry = written.computation()
    caches = [written.add(entry, "parameter", parameter_number=n) for n in range(2)]
    row = written.add(entry, "constant", shape=(1, 3))
    made = [written.add(entry, "dynamic-update-slice", [cache, row]) for cache in caches]
    written.tuple_of(entry, made)
    entries = written.module.input_output_alias.entries
    for output, parameter in ((0, 1), (1, 0)):
        entries.add(output_shape_index=[output], parameter_number=parameter)

    assert len(found(of(tmp_path, written.module), "WP603")) == 2
    for entry in entries:
        entry.parameter_number = 1 - entry.parameter_number
    assert not found(of(tmp_path, written.module), "WP603")


def test_a_cache_that_is_returned_unchanged_is_found(tmp_path: Path) -> None:
    written = Written()
    entry = written.computation()
    x = written.add(entry, "parameter")
    written.tuple_of(entry, [written.add(entry, "negate", [x]), x])

    (reason,) = found(of(tmp_path, written.module), "WP603")

    assert "is returned unchanged as output 1" in reason


# Other files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step.hlo", "step.txt", "step.pb"])
def test_hlo_text_is_rejected_with_the_call_that_writes_the_module(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("HloModule jit_f\n\nENTRY main { ROOT p = f32[] parameter(0) }")

    with pytest.raises(ProgramError, match="is HLO text") as raised:
        read_graphs(tmp_path / name)

    assert "as_serialized_hlo_module_proto" in raised.value.hint


@pytest.mark.parametrize("data", [b"module @jit_f attributes {}", b"ML\xefR\x0dStableHLO"])
def test_mlir_is_rejected_by_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "step.mlir").write_bytes(data)

    with pytest.raises(ProgramError, match="is an MLIR module"):
        read_graphs(tmp_path / "step.mlir")


def test_inspect_says_that_a_module_is_not_compiled() -> None:
    with pytest.raises(ProgramError, match="is not a compiled program") as raised:
        inspect_lowered(FOLDER / "operators.hlo.pb", ProfileOptions(), lambda _: [])

    assert "whisperport check" in raised.value.hint


def renamed(module: Any) -> None:
    module.computations[-1].instructions[1].name = module.computations[-1].instructions[0].name


def reads_itself(module: Any) -> None:
    one = next(i for i in module.computations[-1].instructions if i.operand_ids)
    one.operand_ids[0] = one.id


def calls_itself(module: Any) -> None:
    one = next(i for i in module.computations[-1].instructions if i.called_computation_ids)
    one.opcode = "call"
    one.called_computation_ids[0] = module.computations[-1].id


def set_in(field: str, opcode: str, value: Any) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        one = next(i for i in module.computations[-1].instructions if i.opcode == opcode)
        holder = one
        *path, last = field.split(".")
        for name in path:
            holder = getattr(holder, name)
        if isinstance(value, list):
            del getattr(holder, last)[:]
            getattr(holder, last).extend(value)
        else:
            setattr(holder, last, value)

    return change


def aliased(output: list[int], parameter: int, index: list[int]) -> Callable[[Any], None]:
    def change(module: Any) -> None:
        (entry,) = module.input_output_alias.entries
        del entry.output_shape_index[:]
        entry.output_shape_index.extend(output)
        entry.parameter_number = parameter
        entry.parameter_shape_index.extend(index)

    return change


def aliased_twice(module: Any) -> None:
    module.input_output_alias.entries.add().CopyFrom(module.input_output_alias.entries[0])


DAMAGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "a name is used twice": (renamed, "two instructions are called"),
    "an instruction reads itself": (reads_itself, "which is not before it"),
    "a computation calls itself": (calls_itself, "is called before it is defined"),
    "no such operand": (set_in("operand_ids", "dot", [9, 9]), "reads id 9, which is not before"),
    "a dot of one tensor": (set_in("dot.lhs_contracting", "dot", [5]), "names axis 5 of 2"),
    "a dot of other lengths": (set_in("dot.lhs_contracting", "dot", [0]), "axes of the dot"),
    "no such computation": (set_in("called_computation_ids", "reduce", [77]), "the id 77"),
    "no computation": (set_in("called_computation_ids", "reduce", []), "calls nothing"),
    "a negative axis": (set_in("shape.dimensions", "iota", [-5]), "an axis of length -5"),
    "too many axes": (set_in("shape.dimensions", "iota", [1] * 99), "has 99 axes"),
    "an unknown dtype": (set_in("shape.element_type", "iota", 99), "unknown dtype 99"),
    "parameters with a gap": (set_in("parameter_number", "parameter", 50), "are not numbered"),
    "a tuple of other shapes": (set_in("operand_ids", "tuple", []), "another number of tensors"),
    "an alias of no parameter": (aliased([1], 40, []), "parameter 40"),
    "an alias of no element": (aliased([1], 2, [3]), "no tensor at the index [3]"),
    "an alias of no output": (aliased([7], 2, []), "no tensor at the index [7]"),
    "an alias of the complete result": (aliased([], 2, []), "a tuple, not a tensor"),
    "an alias of another shape": (aliased([0], 2, []), "another shape or dtype"),
    "two aliases": (aliased_twice, "has two aliases"),
    "no entry": (lambda m: setattr(m, "entry_computation_id", 99), "no computation with the id 99"),
    "no root": (lambda m: setattr(m.computations[-1], "root_id", 99), "has no root"),
    "no computations": (lambda m: m.ClearField("computations"), "no computation with the id"),
    "a name of a megabyte": (set_in("name", "iota", "x" * 2**20), "has 1048576 characters"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_module_is_rejected_with_the_reason(tmp_path: Path, damage: str) -> None:
    change, reason = DAMAGES[damage]
    module = stored("cached_step")
    change(module)

    with pytest.raises(ProgramError, match="is damaged, or is not an HLO module") as raised:
        of(tmp_path, module)

    assert reason in raised.value.why


@pytest.mark.parametrize("kept", [1, 20, 300, 5000])
def test_a_truncated_module_is_rejected(tmp_path: Path, kept: int) -> None:
    data = (FOLDER / "cached_step.hlo.pb").read_bytes()[:kept]

    with pytest.raises(ProgramError):
        of(tmp_path, data)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (
            lambda: calls(depth=60, per_level=2),
            "expand to more than 400,000 instructions",
        ),  # 2**59 nodes
        (lambda: calls(depth=300, per_level=1), "more than 100 calls are nested"),
    ],
)
def test_calls_that_expand_without_end_are_rejected(
    tmp_path: Path, module: Callable[[], Any], reason: str
) -> None:
    with pytest.raises(ProgramError) as raised:
        of(tmp_path, module())

    assert reason in raised.value.why


def test_tuples_that_grow_without_end_are_rejected(tmp_path: Path) -> None:
    """Each tuple holds the one before it twice, and states one element only."""
    written = Written()
    entry = written.computation()
    made = written.add(entry, "parameter")
    for _ in range(200):
        made = written.add(entry, "tuple", [made, made], ())
        made.shape.element_type = TUPLE

    with pytest.raises(ProgramError) as raised:
        of(tmp_path, written.module)

    assert "another number of tensors than stated" in raised.value.why


def test_a_literal_nested_without_end_is_rejected(tmp_path: Path) -> None:
    def field(number: int, data: bytes) -> bytes:
        length, tag = len(data), number << 3 | 2
        sizes = bytearray()
        while length > 127:
            sizes.append(length & 127 | 128)
            length >>= 7
        return bytes([tag, *sizes, length]) + data

    literal = b""
    for _ in range(2000):
        literal = field(10, literal)
    instruction = field(8, literal)
    data = field(1, b"m") + field(2, b"e") + field(3, field(2, instruction))

    with pytest.raises(ProgramError) as raised:
        of(tmp_path, data)

    assert "more than 100 messages are nested" in raised.value.why
