"""Read an HLO module: its message, the values of its instructions, and its graph."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

from whisperport.model.inspection.graph import Graph, Node, Shape, Value, build
from whisperport.system.protobuf import Field, message_class

# An HLO module as a message: the fields of it that `read_hlo` needs.
#
# Source: field numbers from xla/service/hlo.proto and xla/xla_data.proto of https://github.com/openxla/xla,
# commits 0b8fa9f and 011b758 (2025).

SCHEMA: dict[str, tuple[Field, ...]] = {
    "Module": (
        ("name", 1, "string"),
        ("computations", 3, "[Computation]"),
        ("entry_computation_id", 6, "int64"),
        ("input_output_alias", 8, "Aliases"),
    ),
    "Aliases": (("entries", 1, "[Alias]"),),
    "Alias": (
        ("output_shape_index", 1, "[int64]"),
        ("parameter_number", 2, "int64"),
        ("parameter_shape_index", 3, "[int64]"),
    ),
    "Computation": (
        ("name", 1, "string"),
        ("instructions", 2, "[Instruction]"),
        ("id", 5, "int64"),
        ("root_id", 6, "int64"),
    ),
    "Instruction": (
        ("name", 1, "string"),
        ("opcode", 2, "string"),
        ("shape", 3, "Shape"),
        ("parameter_number", 9, "int64"),
        ("tuple_index", 13, "int64"),
        ("dimensions", 14, "[int64]"),
        ("convolution", 16, "Convolution"),
        ("slices", 17, "[Slice]"),
        ("custom_call_target", 28, "string"),
        ("dot", 30, "Dot"),
        ("id", 35, "int64"),
        ("operand_ids", 36, "[int64]"),
        ("called_computation_ids", 38, "[int64]"),
        ("groups", 50, "int64"),
        ("comparison_direction", 63, "string"),
    ),
    "Shape": (
        ("element_type", 2, "int32"),
        ("dimensions", 3, "[int64]"),
        ("tuple_shapes", 4, "[Shape]"),
        ("is_dynamic", 6, "[int32]"),
    ),
    "Dot": (
        ("lhs_contracting", 1, "[int64]"),
        ("rhs_contracting", 2, "[int64]"),
        ("lhs_batch", 3, "[int64]"),
        ("rhs_batch", 4, "[int64]"),
    ),
    "Convolution": (("kernel_output_feature", 4, "int64"),),
    "Slice": (("stride", 3, "int64"),),
}
MODULE = message_class(SCHEMA, "Module")


# Tensors of an HLO module: their shapes and dtypes, alone or in tuples.

Tree: TypeAlias = "Value | tuple[Tree, ...]"
"""A tensor, or a tuple of tensors and tuples."""

UNBOUNDED = -(2**63)  # the length of a dynamic axis without an upper bound

TUPLE = 13
DTYPES = {
    **dict(enumerate(("bool", "int8", "int16", "int32", "int64"), 1)),
    **dict(enumerate(("uint8", "uint16", "uint32", "uint64"), 6)),
    **dict(enumerate(("float16", "float32", "float64"), 10)),
    **dict(enumerate(("opaque", "complex64", "bfloat16", "token", "complex128"), 14)),
    **dict(enumerate(("float8_e5m2", "float8_e4m3fn", "int4", "uint4"), 19)),
    **dict(enumerate(("float8_e4m3b11fnuz", "float8_e5m2fnuz", "float8_e4m3fnuz"), 23)),
    **dict(enumerate(("int2", "uint2", "float8_e4m3", "float8_e3m4", "int1", "uint1"), 26)),
    **dict(enumerate(("float4_e2m1fn", "float8_e8m0fnu"), 32)),
}


def declared(name: str, shape: Any, *, constant: bool = False) -> Tree:
    """Return the tensor of a `Shape` message, or a tuple of them; those of a tuple are called `name[0]`."""
    if shape.element_type == TUPLE:
        return tuple(
            declared(f"{name}[{place}]", one, constant=constant)
            for place, one in enumerate(shape.tuple_shapes)
        )
    return Value(name, _axes(shape), DTYPES[shape.element_type], constant)


def leaves(tree: Tree) -> Iterator[Value]:
    """Yield the tensors of a tree in order."""
    if isinstance(tree, Value):
        yield tree
        return
    for inner in tree:
        yield from leaves(inner)


def leaf_at(tree: Tree, index: Sequence[int]) -> Value:
    """Return the tensor at an index, such as (1, 2) for the third element of the second."""
    for place in index:
        assert not isinstance(tree, Value)
        tree = tree[place]
    assert isinstance(tree, Value)
    return tree


def _axes(shape: Any) -> Shape:
    dynamic = list(shape.is_dynamic) or [0] * len(shape.dimensions)
    sizes = zip(shape.dimensions, dynamic, strict=True)
    return tuple(_axis(size, bool(moves)) for size, moves in sizes)


def _axis(size: int, dynamic: bool) -> int | str:
    if dynamic and size == UNBOUNDED:
        return "?"
    return f"<={size}" if dynamic else size


# The graph: one node per instruction, without weights. The computations that `call` and `fusion` name are
# inlined. Of a reduce, the computation gives the operator's name. The computations of `while`,
# `conditional`, `sort`, `map` and `scatter` are not read: such an instruction is one node. The operands of
# a matmul and of a convolution have their axes in aten's order.

INLINED = frozenset({"call", "fusion"})
PASSED_THROUGH = frozenset(
    {"add-dependency", "domain", "opt-barrier"}
)  # return their first operand

HLO = {
    "bitcast": "reshape",
    "broadcast": "expand",
    "concatenate": "cat",
    "convert": "to",
    "convolution": "conv",
    "copy": "clone",
    "cosine": "cos",
    "divide": "div",
    "dot": "matmul",
    "dynamic-slice": "slice",
    "dynamic-update-slice": "slice_scatter",
    "exponential": "exp",
    "exponential-minus-one": "expm1",
    "get-dimension-size": "shape",
    "iota": "arange",
    "log-plus-one": "log1p",
    "logistic": "sigmoid",
    "multiply": "mul",
    "negate": "neg",
    "pad": "constant_pad_nd",
    "power": "pow",
    "reverse": "flip",
    "select": "where",
    "sine": "sin",
    "subtract": "sub",
}
# Operators whose name depends on more than the opcode: on the computation of a reduce, or on the dtype.
HLO_REDUCE = {
    "add": "sum",
    "and": "all",
    "maximum": "amax",
    "minimum": "amin",
    "multiply": "prod",
    "or": "any",
}
HLO_LOGICAL = {"and": "logical_and", "not": "logical_not", "or": "logical_or", "xor": "logical_xor"}


@dataclass(frozen=True)
class Hlo:
    """An HLO module.

    Attributes:
        graph: its instructions. Weights are inputs or constants, as the module has them.
        aliases: place of an output -> name of the input whose memory it is written to.
    """

    graph: Graph
    aliases: Mapping[int, str]


def read_hlo(module: bytes) -> Hlo:
    """Read an `HloModuleProto`, as jax and PyTorch/XLA write it."""
    message = MODULE.FromString(module)
    inliner = _Inliner(message)
    entry = inliner.computations[message.entry_computation_id]
    inputs = _parameters(entry)
    root = inliner.inline(entry, inputs, prefix="")
    flat = [value for tree in inputs for value in leaves(tree)]
    graph = build("module", "torch", inliner.nodes, flat, tuple(leaves(root)))
    return Hlo(graph, _aliases(message, inputs, root))


def _parameters(computation: Any) -> list[Tree]:
    """Return the parameters of a computation in the order of their numbers."""
    parameters = [i for i in computation.instructions if i.opcode == "parameter"]
    parameters.sort(key=lambda instruction: instruction.parameter_number)
    return [declared(instruction.name, instruction.shape) for instruction in parameters]


def _aliases(module: Any, inputs: Sequence[Tree], root: Tree) -> dict[int, str]:
    places = {index: place for place, index in enumerate(_indices(root, ()))}
    return {
        places[tuple(entry.output_shape_index)]: leaf_at(
            inputs[entry.parameter_number], entry.parameter_shape_index
        ).name
        for entry in module.input_output_alias.entries
    }


def _indices(tree: Tree, index: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the index of each tensor of a tree, in order."""
    if isinstance(tree, Value):
        yield index
        return
    for place, inner in enumerate(tree):
        yield from _indices(inner, (*index, place))


class _Inliner:
    """Collects the nodes of a module."""

    def __init__(self, module: Any) -> None:
        self.nodes: list[Node] = []
        self.computations = {computation.id: computation for computation in module.computations}
        self._calls: dict[str, int] = {}  # name of a call -> how often it was inlined

    def inline(self, computation: Any, arguments: Sequence[Tree], prefix: str) -> Tree:
        """Add the nodes of a computation; return its root, a tensor or a tuple of them."""
        trees: dict[int, Tree] = {}
        for instruction in computation.instructions:
            operands = [trees[number] for number in instruction.operand_ids]
            trees[instruction.id] = self._tree(instruction, operands, arguments, prefix)
        return trees[computation.root_id]

    def _tree(
        self, instruction: Any, operands: list[Tree], arguments: Sequence[Tree], prefix: str
    ) -> Tree:
        """Return what an instruction computes; add a node if it computes something."""
        opcode, name = instruction.opcode, f"{prefix}{instruction.name}"
        stated = declared(name, instruction.shape, constant=opcode == "constant")
        if opcode == "parameter":
            return arguments[instruction.parameter_number]
        if opcode == "constant":
            return stated
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            (elements,) = operands
            assert not isinstance(elements, Value)
            return elements[instruction.tuple_index]
        if opcode in PASSED_THROUGH:
            return operands[0]
        if opcode in INLINED:
            return self.inline(self._callee(instruction), operands, self._prefix(instruction))
        inputs = tuple(value for tree in operands for value in leaves(tree))
        self.nodes.append(self._node(instruction, name, inputs, tuple(leaves(stated))))
        return stated

    def _node(
        self, instruction: Any, name: str, inputs: tuple[Value, ...], outputs: tuple[Value, ...]
    ) -> Node:
        opcode, attributes = instruction.opcode, dict[str, Any]()
        if opcode == "custom-call":
            op = f"custom_call.{instruction.custom_call_target}"
            return Node(name, op, opcode, inputs, outputs, custom=True)
        op = self._op(instruction, inputs)
        if op == "matmul":
            inputs = _of_matmul(instruction.dot, *inputs)
            attributes = {"has_batch": bool(instruction.dot.lhs_batch)}
        elif op == "conv":
            inputs = inputs[0], _output_first(inputs[1], instruction.convolution)
        return Node(name, op, opcode, inputs, outputs, attributes)

    def _op(self, instruction: Any, inputs: Sequence[Value]) -> str:
        """Return aten's name of an instruction."""
        opcode: str = instruction.opcode
        if opcode == "reduce":
            callee = self._callee(instruction)
            root = next(i.opcode for i in callee.instructions if i.id == callee.root_id)
            return HLO_REDUCE.get(root, "reduce")
        if opcode == "compare":
            return str(instruction.comparison_direction).lower()
        if opcode in HLO_LOGICAL:
            return HLO_LOGICAL[opcode] if inputs[0].dtype == "bool" else f"bitwise_{opcode}"
        return HLO.get(opcode, opcode.replace("-", "_"))

    def _callee(self, instruction: Any) -> Any:
        return self.computations[instruction.called_computation_ids[0]]

    def _prefix(self, instruction: Any) -> str:
        """Return what precedes the names in a called computation: those of a call are unique."""
        count = self._calls[instruction.name] = self._calls.get(instruction.name, 0) + 1
        return f"{instruction.name}/" if count == 1 else f"{instruction.name}@{count}/"


def _of_matmul(dot: Any, left: Value, right: Value) -> tuple[Value, Value]:
    """Return the operands of a dot with their axes as (batch…, M…, K) and (batch…, K, N…)."""
    batch, free, summed = _parts(left, dot.lhs_batch, dot.lhs_contracting)
    left = replace(left, shape=(*batch, *free, _product(summed)))
    batch, free, summed = _parts(right, dot.rhs_batch, dot.rhs_contracting)
    return left, replace(right, shape=(*batch, _product(summed), *free))


def _parts(value: Value, batch: Sequence[int], summed: Sequence[int]) -> tuple[Shape, Shape, Shape]:
    shape = value.shape or ()
    free = tuple(axis for axis in range(len(shape)) if axis not in (*batch, *summed))
    return (
        tuple(shape[a] for a in batch),
        tuple(shape[a] for a in free),
        tuple(shape[a] for a in summed),
    )


def _product(lengths: Shape) -> int | str:
    return prod(map(int, lengths)) if all(isinstance(n, int) for n in lengths) else "?"


def _output_first(kernel: Value, convolution: Any) -> Value:
    """Return the weight of a convolution with the axis of the output channels first."""
    shape = list(kernel.shape or ())
    outputs = shape.pop(convolution.kernel_output_feature)
    return replace(kernel, shape=(outputs, *shape))
