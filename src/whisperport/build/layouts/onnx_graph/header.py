"""What an ONNX file says of itself, its inputs, outputs and metadata: read without weights, and changed."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.build.layouts.onnx_graph.file import Value
from whisperport.errors import ProgramError, needs

KINDS = range(1, 14)  # onnx.TensorProto's numbers of the types that numpy has
PRODUCTS = frozenset(
    {"MatMul", "Gemm", "Conv", "Attention", "MultiHeadAttention", "FusedMatMul", "FusedConv"}
)
CONVOLUTIONS = frozenset({"Conv", "ConvInteger", "QLinearConv", "FusedConv"})
# What they return has not the type of what they read.
TYPED = frozenset(
    {"Shape", "Size", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsNaN", "IsInf"}
) | {"ArgMax", "NonZero", "QuantizeLinear"}


@dataclass(frozen=True, slots=True)
class OnnxHeader:
    """Inputs and outputs by name, in the file's order, each with its sizes; a text is a symbol."""

    inputs: Mapping[str, list[int | str]]
    outputs: Mapping[str, list[int | str]]
    metadata: Mapping[str, str]
    dtypes: Mapping[str, str]  # of inputs, by numpy's names
    precision: str = "fp32"  # of most matrices that are stored: w8, fp16 or fp32
    branches: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Branch of a node `If`, such as "then_branch" -> the graph's inputs that it reads."""
    multiplies_halves: bool = False  # whether a matrix multiplication is in float16
    convolutions: tuple[Mapping[str, tuple[int, ...]], ...] = ()  # over one axis: their attributes

    @property
    def computes_in_halves(self) -> bool:
        """Whether the graph rounds values to float16: an input, or what it multiplies."""
        return self.multiplies_halves or "float16" in self.dtypes.values()


def read_header(path: Path) -> OnnxHeader:
    """Read the header of an ONNX file.

    Raises:
        ProgramError: the file cannot be read, or is no ONNX model.
        MissingPackageError: onnx is not installed.
    """
    from whisperport.model.inspection.read_onnx import damaged, read_skeleton

    try:
        model = read_skeleton(path)
    except OSError as error:
        raise ProgramError(f"cannot read {path}", why=error.strerror or str(error)) from error
    if not model.graph.node:
        raise damaged(path, ValueError("it has no nodes"))
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in stored]
    return OnnxHeader(
        {text(value.name): _sizes(value) for value in inputs},
        {text(value.name): _sizes(value) for value in model.graph.output},
        {text(entry.key): text(entry.value) for entry in model.metadata_props},
        {text(value.name): _dtype(value) for value in inputs},
        _precision(model.graph.initializer),
        {
            text(attribute.name): frozenset(
                text(name) for inner in attribute.g.node for name in inner.input
            ).intersection(text(value.name) for value in inputs)
            for node in model.graph.node
            if node.op_type == "If"
            for attribute in node.attribute
        },
        _multiplies_halves(model.graph, frozenset()),
        tuple(_convolutions(model.graph)),
    )


def difference(header: OnnxHeader, inputs: Iterable[Value], outputs: Iterable[Value]) -> str:
    """Return in words which input or output is missing, new or of another form; empty: none.

    Args:
        header: of the graph.
        inputs: those that an app gives.
        outputs: those that it reads; a graph may have further ones.
    """
    given = list(inputs)
    sides = ("input", header.inputs, given), ("output", header.outputs, list(outputs))
    for side, values, known in sides:
        names = [name for name, *_ in known]
        further = [name for name in values if name not in names]
        if missing := [name for name in names if name not in values]:
            instead = f"; it has {further[0]}" if further else ""
            return f"no {side} {missing[0]}{instead}"
        if side == "input" and further:
            return f"an input {further[0]}, which no app gives"
        for name, _, sizes in known:
            if len(values[name]) not in (0, len(sizes)):
                return f"{side} {name} has {len(values[name])} axes, and not {len(sizes)}"
            if side == "input" and (reason := several_texts(name, values[name])):
                return reason
    return other_type(header, {name: (str(np.dtype(dtype)), "float16") for name, dtype, _ in given})


def other_type(header: OnnxHeader, types: Mapping[str, Sequence[str]]) -> str:
    """Return in words which input is of a type that an app does not give; empty: none.

    Args:
        header: of the graph.
        types: input -> those that it may have, what the app gives first.
    """
    for name, dtypes in types.items():
        if header.dtypes.get(name, "") not in ("", *dtypes):
            return f"input {name} is {header.dtypes[name]}; the app gives {dtypes[0]}"
    return ""


def several_texts(name: str, sizes: list[int | str]) -> str:
    """Return in words that an input is of another number of texts than one; empty: it may be of one."""
    if sizes and isinstance(sizes[0], int) and sizes[0] != 1:
        return f"input {name} is of {sizes[0]} texts; the app gives one"
    return ""


def wrong_convolutions(header: OnnxHeader) -> Iterator[str]:
    """Yield in words which attributes of an encoder's two convolutions are not Whisper's."""
    if len(header.convolutions) != 2:
        return
    for number, attributes in enumerate(header.convolutions, 1):
        right = {"pads": (1, 1), "strides": (number,), "dilations": (1,), "group": (1,)}
        for name, numbers in attributes.items():
            if numbers != right[name]:
                stated, expected = (", ".join(map(str, n)) for n in (numbers, right[name]))
                yield f"{name} of encoder.conv{number}: {stated}, and not {expected}"


def change_model(path: Path, change: Callable[[Any], None]) -> None:
    """Change a model in a file. It is read completely; what it stores in other files stays there.

    Raises:
        ProgramError: the file cannot be read, or is no ONNX model.
        MissingPackageError: onnx is not installed.
    """
    with needs("cannot change an ONNX file: the package onnx is not installed", extra="export"):
        import onnx
        from google.protobuf.message import DecodeError

        from whisperport.model.inspection.read_onnx import damaged
    try:
        model = onnx.load(path, load_external_data=False)
        change(model)
        path.write_bytes(model.SerializeToString())
    except (ValueError, DecodeError) as error:
        raise damaged(path, error) from error


def rename(model: Any, names: Mapping[str, str]) -> None:
    """Give values of a model other names, also where inner graphs read them."""
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    graphs = [model.graph]
    while graphs:
        for node in graphs.pop().node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]
            graphs += [entry.g for entry in node.attribute if entry.HasField("g")]


def text(value: str | bytes) -> str:
    """Return a text of a file; protobuf returns one that is not UTF-8 as bytes."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def _dtype(value: Any) -> str:
    from onnx import helper

    kind = value.type.tensor_type.elem_type
    return str(np.dtype(helper.tensor_dtype_to_np_dtype(kind))) if kind in KINDS else ""


def _sizes(value: Any) -> list[int | str]:
    axes = value.type.tensor_type.shape.dim
    return [axis.dim_value if axis.HasField("dim_value") else text(axis.dim_param) for axis in axes]


def _multiplies_halves(graph: Any, outer: frozenset[str | bytes]) -> bool:
    """Return whether a matrix multiplication is in float16, also in an inner graph.

    Args:
        graph: its nodes are in the order in which they are computed.
        outer: values in float16 of the graph around it.
    """
    from onnx import TensorProto

    inputs = (v.name for v in graph.input if v.type.tensor_type.elem_type == TensorProto.FLOAT16)
    stored = (t.name for t in graph.initializer if t.data_type == TensorProto.FLOAT16)
    halves = {*outer, *inputs, *stored}
    for node in graph.node:
        inner = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        if any(_multiplies_halves(part, frozenset(halves)) for part in inner):
            return True
        is_half = not halves.isdisjoint(node.input)
        if is_half and node.op_type in PRODUCTS:
            return True
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to":
                is_half = attribute.i == TensorProto.FLOAT16
            if node.op_type == "Constant" and attribute.HasField("t"):
                is_half = attribute.t.data_type == TensorProto.FLOAT16
        if is_half and node.op_type not in TYPED:
            halves.update(node.output)
    return False


def _convolutions(graph: Any) -> Iterator[Mapping[str, tuple[int, ...]]]:
    """Yield the attributes of convolutions; of one behind a node that pads, all but the pads."""
    padded = {name for node in graph.node if node.op_type == "Pad" for name in node.output}
    for node in graph.node:
        if node.op_type not in CONVOLUTIONS:
            continue
        lists = {a.name: tuple(a.ints) for a in node.attribute if a.ints}
        strides, dilations = lists.get("strides", (1,)), lists.get("dilations", (1,))
        group = next((a.i for a in node.attribute if a.name == "group"), 1)
        attributes = {"strides": strides, "dilations": dilations, "group": (group,)}
        automatic = next((text(a.s) for a in node.attribute if a.name == "auto_pad"), "")
        pads = lists.get("pads", (0, 0))
        if automatic.startswith("SAME"):
            # Of a kernel of 3, over an even number of frames.
            pads = (1, 1) if strides == (1,) else (0, 1) if automatic == "SAME_UPPER" else (1, 0)
        if len(strides) == len(dilations) == 1 and len(pads) == 2:
            is_padded = pads == (0, 0) and not padded.isdisjoint(node.input)
            yield attributes if is_padded else {"pads": pads, **attributes}


def _precision(tensors: Iterable[Any]) -> str:
    import onnx

    types = [tensor.data_type for tensor in tensors if len(tensor.dims) > 1]
    if {onnx.TensorProto.INT8, onnx.TensorProto.UINT8} & set(types):
        return "w8"
    halves = types.count(onnx.TensorProto.FLOAT16)
    return "fp16" if halves > types.count(onnx.TensorProto.FLOAT) else "fp32"
