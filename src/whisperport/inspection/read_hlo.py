"""Read the graph of an HLO module: one node per instruction, without weights.

The computations that `call` and `fusion` name are inlined. Of a reduce, the computation gives the
operator's name. The computations of `while`, `conditional`, `sort`, `map` and `scatter` are not read: such
an instruction is one node.
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from whisperport.inspection.graph import Graph, Node, Value, build
from whisperport.inspection.read_hlo_proto import damaged, read_module
from whisperport.inspection.read_hlo_values import (
    MAX_RANK,
    Tree,
    check_same_form,
    declared,
    leaf_at,
    leaves,
)
from whisperport.inspection.vocabulary import HLO, HLO_LOGICAL, HLO_REDUCE

MAX_ENTRIES = (
    400_000  # instructions and operands after inlining; Whisper large's decoder has 30,000
)
INLINED = frozenset({"call", "fusion"})
MAX_DEPTH = 100  # calls inside each other
MAX_NAME = 1000  # characters
PASSED_THROUGH = frozenset(
    {"add-dependency", "domain", "opt-barrier"}
)  # return their first operand
DIRECTIONS = frozenset({"EQ", "NE", "GE", "GT", "LE", "LT"})


def read_hlo(path: Path) -> Graph:
    """Read the graph of an HLO module.

    Weights are inputs or constants, as the module has them. `Graph.aliases` holds the module's
    `input_output_alias`.

    Args:
        path: a file with an `HloModuleProto` or `HloProto`.

    Raises:
        ProgramError: the file is damaged, is not an HLO module, or is HLO text.
    """
    module = read_module(path)
    try:
        return _graph(path.stem.removesuffix(".hlo"), module)
    except (ValueError, RecursionError) as error:
        raise damaged(path, error) from error


def _graph(name: str, module: Any) -> Graph:
    inliner = _Inliner(module)
    entry = inliner.computation(module.entry_computation_id, len(inliner.order))
    inputs = _parameters(entry)
    root = inliner.inline(entry, inputs, prefix="", depth=0)
    outputs = tuple(leaves(root))
    aliases = _aliases(module, inputs, root)
    flat = [value for tree in inputs for value in leaves(tree)]
    return build(name, "hlo", inliner.nodes, flat, outputs, aliases=aliases)


def _parameters(computation: Any) -> list[Tree]:
    """Return the parameters of a computation in the order of their numbers."""
    found = {
        one.parameter_number: declared(one.name, one.shape)
        for one in computation.instructions
        if one.opcode == "parameter"
    }
    count = sum(one.opcode == "parameter" for one in computation.instructions)
    if sorted(found) != list(range(count)):
        raise ValueError(f"the parameters of `{_short(computation.name)}` are not numbered from 0")
    return [found[number] for number in range(count)]


def _aliases(module: Any, inputs: Sequence[Tree], root: Tree) -> dict[int, str]:
    """Return place of an output -> name of the input whose memory it is written to."""
    places = _places(root)
    found: dict[int, str] = {}
    for entry in module.input_output_alias.entries:
        if not 0 <= entry.parameter_number < len(inputs):
            raise ValueError(f"an alias names parameter {entry.parameter_number}, which is missing")
        given = leaf_at(inputs[entry.parameter_number], entry.parameter_shape_index)
        made = leaf_at(root, entry.output_shape_index)
        check_same_form(f"the alias of {_short(given.name)}", given, made)
        place = places[tuple(entry.output_shape_index)]
        if place in found or given.name in found.values():
            raise ValueError(f"`{_short(given.name)}` or its output has two aliases")
        found[place] = given.name
    return found


def _places(root: Tree) -> dict[tuple[int, ...], int]:
    """Return the index of each tensor in a tree -> its place among all tensors."""
    places: dict[tuple[int, ...], int] = {}

    def visit(tree: Tree, index: tuple[int, ...]) -> None:
        if isinstance(tree, Value):
            places[index] = len(places)
            return
        for place, inner in enumerate(tree):
            visit(inner, (*index, place))

    visit(root, ())
    return places


class _Inliner:
    """Collects the nodes of a module. Callees come before their callers, so that no call is a cycle."""

    def __init__(self, module: Any) -> None:
        self.nodes: list[Node] = []
        self.order = {one.id: place for place, one in enumerate(module.computations)}
        if len(self.order) != len(module.computations):
            raise ValueError("two computations have the same id")
        self._computations = module.computations
        self._names: set[str] = set()
        self._calls: dict[str, int] = {}  # name of a call -> how often it was inlined
        _check_size(module)

    def computation(self, number: int, before: int) -> Any:
        """Return the computation with an id, which must be listed before place `before`."""
        place = self.order.get(number)
        if place is None:
            raise ValueError(f"there is no computation with the id {number}")
        if place >= before:
            raise ValueError("a computation is called before it is defined")
        return self._computations[place]

    def inline(self, computation: Any, arguments: Sequence[Tree], prefix: str, depth: int) -> Tree:
        """Add the nodes of a computation; return its root, a tensor or a tuple of them."""
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} calls are nested")
        made: dict[int, Tree] = {}
        for one in computation.instructions:
            if one.id in made:
                raise ValueError(f"two instructions have the id {one.id}")
            made[one.id] = self._tree(one, computation, made, arguments, prefix, depth)
        if computation.root_id not in made:
            raise ValueError(f"`{_short(computation.name)}` has no root")
        return made[computation.root_id]

    def _tree(
        self,
        one: Any,
        computation: Any,
        made: Mapping[int, Tree],
        arguments: Sequence[Tree],
        prefix: str,
        depth: int,
    ) -> Tree:
        """Return what an instruction computes; add a node if it computes something."""
        name = self._unique(prefix, one)
        stated = declared(name, one.shape, constant=one.opcode == "constant")
        operands = _operands(one, made)
        if one.opcode == "parameter":
            return _argument(one, arguments, stated)
        if one.opcode == "constant":
            return stated
        if one.opcode == "tuple":
            check_same_form(_short(one.name), tuple(operands), stated)
            return tuple(operands)
        if one.opcode == "get-tuple-element":
            return _element(one, operands)
        if one.opcode in PASSED_THROUGH and operands:
            check_same_form(_short(one.name), operands[0], stated)
            return operands[0]
        if one.opcode in INLINED:
            callee = self._callee(one, computation)
            result = self.inline(callee, operands, self._prefix(one), depth + 1)
            check_same_form(_short(one.name), result, stated)
            return result
        self._add(one, computation, name, operands, stated)
        return stated

    def _add(
        self, one: Any, computation: Any, name: str, operands: Sequence[Tree], stated: Tree
    ) -> None:
        inputs = tuple(value for tree in operands for value in leaves(tree))
        custom = one.opcode == "custom-call"
        reduce = self._callee(one, computation) if one.opcode == "reduce" else None
        op = f"custom_call.{one.custom_call_target}" if custom else _op(one, inputs, reduce)
        attributes = _attributes(one, op, inputs)
        self.nodes.append(
            Node(name, op, one.opcode, inputs, tuple(leaves(stated)), attributes, custom)
        )

    def _callee(self, one: Any, computation: Any) -> Any:
        if not one.called_computation_ids:
            raise ValueError(f"`{_short(one.name)}` calls nothing")
        return self.computation(one.called_computation_ids[0], self.order[computation.id])

    def _prefix(self, one: Any) -> str:
        """Return what precedes the names in a called computation: those of a call are unique."""
        count = self._calls[one.name] = self._calls.get(one.name, 0) + 1
        return f"{one.name}/" if count == 1 else f"{one.name}@{count}/"

    def _unique(self, prefix: str, one: Any) -> str:
        if not one.name or len(one.name) > MAX_NAME:
            raise ValueError(f"the name of an instruction has {len(one.name)} characters")
        name = f"{prefix}{one.name}"
        if name in self._names:
            raise ValueError(f"two instructions are called `{_short(name)}`")
        self._names.add(name)
        return name


def _check_size(module: Any) -> None:
    """Check how many instructions, operands and tensors there are when every call is inlined."""
    sizes: dict[int, int] = {}
    for computation in module.computations:
        size = 0
        for one in computation.instructions:
            size += 1 + len(one.operand_ids) + _tensors(one.shape)
            if one.opcode in INLINED:
                size += sum(sizes.get(number, 0) for number in one.called_computation_ids)
        sizes[computation.id] = min(size, MAX_ENTRIES + 1)
    if sizes.get(module.entry_computation_id, 0) > MAX_ENTRIES:
        raise ValueError(f"its calls expand to more than {MAX_ENTRIES:,} instructions and operands")


def _tensors(shape: Any) -> int:
    return 1 + sum(_tensors(inner) for inner in shape.tuple_shapes)


def _operands(one: Any, made: Mapping[int, Tree]) -> list[Tree]:
    missing = [number for number in one.operand_ids if number not in made]
    if missing:
        raise ValueError(f"`{_short(one.name)}` reads id {missing[0]}, which is not before it")
    return [made[number] for number in one.operand_ids]


def _argument(one: Any, arguments: Sequence[Tree], stated: Tree) -> Tree:
    if not 0 <= one.parameter_number < len(arguments):
        raise ValueError(f"`{_short(one.name)}` is parameter {one.parameter_number}; not given")
    given: Tree = arguments[one.parameter_number]
    check_same_form(_short(one.name), given, stated)
    return given


def _element(one: Any, operands: Sequence[Tree]) -> Tree:
    place: int = one.tuple_index
    elements = operands[0] if len(operands) == 1 else ()
    if isinstance(elements, Value) or not 0 <= place < len(elements):
        raise ValueError(f"`{_short(one.name)}` reads element {place}; there is none")
    return elements[place]


def _op(one: Any, inputs: Sequence[Value], reduce: Any) -> str:
    """Return aten's name of an instruction."""
    if reduce is not None:
        root = next((i.opcode for i in reduce.instructions if i.id == reduce.root_id), "")
        return HLO_REDUCE.get(root, "reduce")
    if one.opcode == "compare" and one.comparison_direction in DIRECTIONS:
        return str(one.comparison_direction).lower()
    if one.opcode in HLO_LOGICAL:
        logical = bool(inputs) and inputs[0].dtype == "bool"
        return HLO_LOGICAL[one.opcode] if logical else f"bitwise_{one.opcode}"
    return HLO.get(one.opcode, str(one.opcode).replace("-", "_"))


def _attributes(one: Any, op: str, inputs: Sequence[Value]) -> dict[str, Any]:
    """Return attributes with aten's names; for `matmul` and `conv` also `contracted`.

    `contracted` is the number of elements over which one element of the output is summed. The operands of
    a dot have their axes in any order.
    """
    if len(one.dimensions) > MAX_RANK:
        raise ValueError(f"`{_short(one.name)}` has {len(one.dimensions)} dimensions")
    dimensions = tuple(one.dimensions)
    if op == "matmul":
        return _dot(one, inputs)
    if op == "conv":
        return {"groups": one.groups or 1, "contracted": _kernel(one, inputs)}
    if one.opcode == "reduce":
        return {"dim": list(dimensions), "keepdim": False}
    if op == "cat":
        return {"dim": dimensions[0] if dimensions else 0}
    if op in ("expand", "transpose"):
        return {"dims": dimensions}
    if one.opcode == "slice":
        return {"step": max((entry.stride for entry in one.slices), default=1)}
    return {}


def _dot(one: Any, inputs: Sequence[Value]) -> dict[str, Any]:
    if len(inputs) != 2:
        raise ValueError(f"`{_short(one.name)}` is a dot of {len(inputs)} tensors")
    left, right = inputs
    axes = {
        "lhs_contracting": (tuple(one.dot.lhs_contracting), left),
        "rhs_contracting": (tuple(one.dot.rhs_contracting), right),
        "lhs_batch": (tuple(one.dot.lhs_batch), left),
        "rhs_batch": (tuple(one.dot.rhs_batch), right),
    }
    lengths = {
        key: [_length(one, value, axis) for axis in given] for key, (given, value) in axes.items()
    }
    for what in ("contracting", "batch"):
        if lengths[f"lhs_{what}"] != lengths[f"rhs_{what}"]:
            raise ValueError(f"the {what} axes of the dot `{_short(one.name)}` differ")
    static = [length for length in lengths["lhs_contracting"] if isinstance(length, int)]
    return {key: given for key, (given, _) in axes.items()} | {"contracted": prod(static)}


def _kernel(one: Any, inputs: Sequence[Value]) -> int:
    if len(inputs) != 2:
        raise ValueError(f"`{_short(one.name)}` is a convolution of {len(inputs)} tensors")
    made = _length(one, inputs[1], one.convolution.kernel_output_feature)
    size = inputs[1].size
    return size // made if isinstance(made, int) and made and size else 0


def _length(one: Any, value: Value, axis: int) -> int | str:
    shape = value.shape or ()
    if not 0 <= axis < len(shape):
        raise ValueError(f"`{_short(one.name)}` names axis {axis} of {len(shape)}")
    return shape[axis]


def _short(name: str) -> str:
    return name[:80]
