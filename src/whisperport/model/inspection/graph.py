"""A program's graph without weights: nodes, tensors, shapes, and one set of operator names for all formats.

A graph is read from a torch graph, `.pt2`, `.onnx` or `.tflite`. Nodes also keep the format's own
names.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

# torch.export and torch.onnx write frames as Python does, the outermost first, without the last line.
FRAME = re.compile(
    r'^ *File "([^"\n]+)", line (\d{1,9}), in [^\n]*(?:\n(?! *File ")([^\n]*))?', re.M
)
INSTALLED = re.compile(r"^.*/(?:site|dist)-packages/")
OF_TORCH = re.compile(r"^torch/|/torch/(?:nn|export|fx|_[a-z]+)/")
MAX_TRACE = 1 << 16  # characters of a stack trace that are read


@dataclass(frozen=True, slots=True)
class SourceLine:
    """One line of Python."""

    file: str  # as the exporter wrote it; usually an absolute path of the exporter's machine
    line: int  # from 1
    code: str = ""  # the text of the line; empty: not stored

    @property
    def package_path(self) -> str:
        """The file without the folder that its package is installed in: `whisper/model.py`."""
        return INSTALLED.sub("", self.file.replace("\\", "/"))


def innermost_line(stack_trace: str) -> SourceLine | None:
    """Return the innermost line that is not in torch; None if the trace has no frame.

    If every frame is in torch, the result is the innermost one.
    """
    frames = [
        SourceLine(file, int(line), code.strip())
        for file, line, code in FRAME.findall(stack_trace[:MAX_TRACE])
    ]
    own = [frame for frame in frames if not OF_TORCH.search(frame.package_path)]
    return next(reversed(own or frames), None)


# "ir": the format of a target's own, whose `Profiler` reads it.
Format = Literal["torch", "onnx", "tflite", "ir"]

Shape = tuple[int | str, ...]
"""One entry per axis; a string is the name of a dynamic axis."""

WIDTHS = {"complex128": 16, "complex64": 8, "float64": 8, "int64": 8, "uint64": 8}
WIDTHS |= {"float32": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2, "int16": 2}
WIDTHS |= {"uint16": 2, "int8": 1, "uint8": 1, "bool": 1}


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the integers of a tensor represent real numbers."""

    scales: int  # number of scales: 1 for the complete tensor, or one per channel
    symmetric: bool  # whether every zero point is 0
    scale: float = 0.0  # the first; 0: not read
    zero_point: int = 0  # the first


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of a graph."""

    name: str  # in the file
    shape: Shape | None = None  # None: the file does not state it
    dtype: str = ""  # numpy's name; empty: the file does not state it
    constant: bool = False  # stored in the file, and never written to
    quantization: Quantization | None = None  # None: not quantized, or the file does not state it

    @property
    def size(self) -> int | None:
        """Number of elements; None if the shape is not known or not static."""
        if self.shape is None or any(isinstance(axis, str) for axis in self.shape):
            return None
        return prod(int(axis) for axis in self.shape)

    @property
    def n_bytes(self) -> int | None:
        """Size in bytes; None if the shape is not static or the dtype's width is not known."""
        if self.size is None or self.dtype not in WIDTHS:
            return None
        return self.size * WIDTHS[self.dtype]


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. `op` and the order of `inputs` follow aten in every file format."""

    name: str
    op: str  # aten's name without overload, "linear"; custom operators keep a prefix: "mylib.fft"
    original_op: str  # the name in the file: "aten.linear.default", "Gemm", "FULLY_CONNECTED"
    inputs: tuple[Value | None, ...]  # None: an optional input that is not given
    outputs: tuple[Value, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)  # with aten's names
    custom: bool = False  # not a standard operator of torch, ONNX or TFLite
    module: str = ""  # torch and ONNX: the path of the innermost module, "blocks.0.attn.query"
    module_type: str = ""  # torch only: the class of that module, "torch.nn.modules.linear.Linear"
    source: SourceLine | None = (
        None  # torch and ONNX: the line of the model's code; None: not stored
    )

    @property
    def tensors(self) -> tuple[Value, ...]:
        """The inputs without those that are not given."""
        return tuple(value for value in self.inputs if value is not None)

    @property
    def place(self) -> str:
        """Module and line of code: "blocks.0.attn, whisper/model.py:111"; empty: not stored."""
        line = f"{self.source.package_path}:{self.source.line}" if self.source else ""
        return ", ".join(filter(None, (self.module, line)))

    @property
    def output(self) -> Value:
        """The first output; a `Value` without name and shape if there is no output."""
        return self.outputs[0] if self.outputs else Value("")

    @property
    def in_place(self) -> bool:
        """Whether it is an operator of torch that writes to its first input: `add_`, and not `__and__`."""
        name = self.original_op.split(".")[1] if self.original_op.startswith("aten.") else ""
        return name.endswith("_") and not name.startswith("_") and name != "detach_"


# For these operators, constant inputs after the first are arguments (shapes, axes, widths), not tensors.
CONSTANT_ARGUMENT_OPS = frozenset(
    {"amax", "clamp", "constant_pad_nd", "cumsum", "expand", "full", "mean"}
)
CONSTANT_ARGUMENT_OPS |= {"reshape", "slice", "split", "squeeze", "sum", "transpose", "unsqueeze"}


def without_arguments(op: str, inputs: Iterable[Value | None]) -> tuple[Value | None, ...]:
    """Return the inputs of an ONNX or TFLite node without those that are arguments, such as axes."""
    values = tuple(inputs)
    if op not in CONSTANT_ARGUMENT_OPS:
        return values
    return values[:1] + tuple(value for value in values[1:] if value and not value.constant)


@dataclass(frozen=True, slots=True)
class Graph:
    """The graph of one program."""

    name: str
    format: Format
    nodes: tuple[Node, ...]  # in an order in which they can run
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    opset: int | None = None  # ONNX only
    # TFLite only: `nodes`, and those that depend on constants only. Most compilers fold them.
    with_folded: tuple[Node, ...] = ()
    folded: tuple[Node, ...] = ()  # those that depend on constants only, and are not among `nodes`
    _producers: dict[str, Node] = field(default_factory=dict, repr=False, compare=False)

    def producer(self, value: Value) -> Node | None:
        """Return the node that computes `value`; None if the value is an input or a constant."""
        if not self._producers:
            self._producers.update({out.name: node for node in self.nodes for out in node.outputs})
        return self._producers.get(value.name)

    def unfolded(self) -> "Graph":
        """Return the graph with the nodes that depend on constants only, for a runtime that runs them."""
        return replace(self, nodes=self.with_folded or self.nodes, _producers={})


FOLDED_FORMATS: frozenset[Format] = frozenset({"onnx", "tflite", "ir"})

# Operators without effect at inference: compilers remove them.
_NO_OPS = frozenset({"detach_", "dropout", "identity", "lift_fresh_copy"})


def build(
    name: str,
    format: Format,
    nodes: Iterable[Node],
    inputs: Iterable[Value],
    outputs: Iterable[Value],
    opset: int | None = None,
) -> Graph:
    """Build a graph without nodes that have no effect, and without nodes whose outputs are not read.

    Compilers of all formats but torch's fold nodes that depend on constants only, so such nodes are removed
    too; of a TFLite file they are kept in `with_folded`.
    """
    same: dict[str, Value] = {}
    kept: list[Node] = []
    folded: list[Node] = []
    every: list[Node] = []
    for node in nodes:
        node = replace(node, inputs=tuple(v and same.get(v.name, v) for v in node.inputs))
        if _has_no_effect(node):
            same[node.output.name] = node.tensors[0]
        elif format in FOLDED_FORMATS and _is_constant(node):
            same |= {value.name: replace(value, constant=True) for value in node.outputs}
            folded.append(node)
            every.append(node)
        else:
            kept.append(node)
            every.append(node)
    returned = tuple(same.get(value.name, value) for value in outputs)
    alive = _without_dead_nodes(kept, returned)
    graph = Graph(name, format, alive, tuple(inputs), returned, opset, folded=tuple(folded))
    if format != "tflite":
        return graph
    return replace(graph, with_folded=_without_dead_nodes(every, returned))


def _without_dead_nodes(nodes: list[Node], returned: tuple[Value, ...]) -> tuple[Node, ...]:
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


def _has_no_effect(node: Node) -> bool:
    if len(node.outputs) != 1 or not node.tensors:
        return False
    source, result = node.tensors[0], node.output
    return node.op in _NO_OPS or (
        node.op == "to"
        and result.dtype != ""
        and (source.shape, source.dtype) == (result.shape, result.dtype)
    )
