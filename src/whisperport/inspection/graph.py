"""A program as reports see it: nodes, tensors and shapes in one vocabulary, and no weights.

Read from a torch graph, `.pt2`, `.onnx` or `.tflite`; the format's own names are kept beside ours.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

Format = Literal["torch", "onnx", "tflite"]

Shape = tuple[int | str, ...]
"""One entry an axis; a string is the name of a dynamic one."""

WIDTHS = {"complex128": 16, "complex64": 8, "float64": 8, "int64": 8, "uint64": 8}
WIDTHS |= {"float32": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2, "int16": 2}
WIDTHS |= {"uint16": 2, "int8": 1, "uint8": 1, "bool": 1}


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor: its name in the file, shape, and dtype by numpy's name."""

    name: str
    shape: Shape | None = None  # None: the file does not say
    dtype: str = ""  # empty: the file does not say
    constant: bool = False  # stored in the file, and never written to

    @property
    def size(self) -> int | None:
        """Number of elements; None where the shape is not known or not static."""
        if self.shape is None or any(isinstance(axis, str) for axis in self.shape):
            return None
        return prod(int(axis) for axis in self.shape)

    @property
    def n_bytes(self) -> int | None:
        """Bytes it takes; None where the shape is not static or the dtype's width not known."""
        if self.size is None or self.dtype not in WIDTHS:
            return None
        return self.size * WIDTHS[self.dtype]


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. `op` and the order of `inputs` follow aten, whatever the file's format."""

    name: str
    op: str  # "linear"; operators outside the vocabulary keep a prefix: "mylib.fft"
    written: str  # as the file says it: "aten.linear.default", "Gemm", "FULLY_CONNECTED"
    inputs: tuple[Value | None, ...]  # None: an optional one left out
    outputs: tuple[Value, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)  # by aten's names
    custom: bool = False  # not of torch's, ONNX's or TFLite's own operators
    module: str = ""  # torch only: the path of the innermost module, "blocks.0.attn.query"
    module_type: str = ""  # and its class, "torch.nn.modules.linear.Linear"

    @property
    def tensors(self) -> tuple[Value, ...]:
        """The inputs that are there."""
        return tuple(value for value in self.inputs if value is not None)

    @property
    def output(self) -> Value:
        """The first output; an empty tensor of no shape where there is none."""
        return self.outputs[0] if self.outputs else Value("")


# Of these, constants after the first input are arguments (shapes, axes, widths) and no tensors.
TAKES_ARGUMENTS = frozenset(
    {"amax", "clamp", "constant_pad_nd", "cumsum", "expand", "full", "mean"}
)
TAKES_ARGUMENTS |= {"reshape", "slice", "split", "squeeze", "sum", "transpose", "unsqueeze"}


def without_arguments(op: str, inputs: Iterable[Value | None]) -> tuple[Value | None, ...]:
    """The tensors among the inputs of an ONNX or TFLite node."""
    given = tuple(inputs)
    if op not in TAKES_ARGUMENTS:
        return given
    return given[:1] + tuple(value for value in given[1:] if value and not value.constant)


@dataclass(frozen=True, slots=True)
class Graph:
    """One program."""

    name: str
    format: Format
    nodes: tuple[Node, ...]  # in an order in which they can be run
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    opset: int | None = None  # ONNX only
    _producers: dict[str, Node] = field(default_factory=dict, repr=False, compare=False)

    def producer(self, value: Value) -> Node | None:
        """The node that computes `value`; None where it is an input or a constant."""
        if not self._producers:
            self._producers.update({out.name: node for node in self.nodes for out in node.outputs})
        return self._producers.get(value.name)


# What no compiler runs.
_NOTHING = frozenset({"detach_", "dropout", "identity", "lift_fresh_copy"})


def build(
    name: str,
    format: Format,
    nodes: Iterable[Node],
    inputs: Iterable[Value],
    outputs: Iterable[Value],
    opset: int | None = None,
) -> Graph:
    """A graph without the nodes that do nothing, or nothing that anyone reads.

    ONNX and TFLite compilers compute at once what depends on constants alone, so that such nodes are
    left out too. torch's compilers do not.
    """
    same: dict[str, Value] = {}
    kept = []
    for node in nodes:
        node = replace(node, inputs=tuple(v and same.get(v.name, v) for v in node.inputs))
        if _does_nothing(node):
            same[node.output.name] = node.tensors[0]
        elif format != "torch" and _is_constant(node):
            same |= {value.name: replace(value, constant=True) for value in node.outputs}
        else:
            kept.append(node)
    returned = tuple(same.get(value.name, value) for value in outputs)
    return Graph(name, format, _read_by_someone(kept, returned), tuple(inputs), returned, opset)


def _read_by_someone(nodes: list[Node], returned: tuple[Value, ...]) -> tuple[Node, ...]:
    read = {value.name for value in returned}
    kept = []
    for node in reversed(nodes):
        if node.custom or any(value.name in read for value in node.outputs):
            read.update(value.name for value in node.tensors)
            kept.append(node)
    return tuple(reversed(kept))


def _is_constant(node: Node) -> bool:
    return (
        not node.custom
        and bool(node.tensors)
        and all(value.constant for value in node.tensors)
        and all(value.size is not None for value in node.outputs)
    )


def _does_nothing(node: Node) -> bool:
    if len(node.outputs) != 1 or not node.tensors:
        return False
    given, made = node.tensors[0], node.output
    return node.op in _NOTHING or (
        node.op == "to"
        and made.dtype != ""
        and (given.shape, given.dtype) == (made.shape, made.dtype)
    )
