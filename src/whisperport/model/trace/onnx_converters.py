"""Convert operators of newer ONNX opsets to operators of opset 13; all shapes are static."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir


class ConversionError(Exception):
    """A node cannot be converted; the message is the reason."""


class NodeWriter:
    """Writes the nodes that replace `node`, with operators of opset 13."""

    def __init__(self, node: ir.Node) -> None:
        self.node = node
        self.nodes: list[ir.Node] = []
        x = node.inputs[0]
        assert x is not None
        self.x = x
        self.shape = () if x.shape is None else x.shape.numpy()

    def write(
        self,
        operator: str,
        *inputs: ir.Value,
        shape: Sequence[int] | None = None,
        dtype: ir.DataType | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """Write one node and return its output.

        Args:
            shape: of the output; None: the shape of the original node's first input.
            dtype: of the output; None: the dtype of that input.
        """
        node = ir.node(operator, inputs, attributes)
        node.outputs[0].name = f"{self.node.outputs[0].name}/{operator}_{len(self.nodes)}"
        node.outputs[0].shape = ir.Shape(self.shape if shape is None else shape)
        node.outputs[0].type = ir.TensorType(dtype or self.x.dtype or ir.DataType.FLOAT)
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, array: Any, dtype: ir.DataType | None = None) -> ir.Value:
        """Write a small constant and return it; its default dtype is that of the original node's input."""
        dtype = dtype or self.x.dtype or ir.DataType.FLOAT
        tensor = ir.tensor(np.asarray(array, dtype.numpy()))
        return self.write("Constant", shape=tensor.shape.numpy(), dtype=dtype, value=tensor)

    def attribute(self, name: str, default: Any) -> Any:
        """Return an attribute of the original node, or its default."""
        attribute = self.node.attributes.get(name)
        return default if attribute is None else attribute.value

    def known(self, index: int) -> list[int] | None:
        """Return the values of a constant integer input; None if the input is not given.

        Raises:
            ConversionError: the input is computed.
        """
        value = self.node.inputs[index] if index < len(self.node.inputs) else None
        if value is None:
            return None
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is None:
            raise ConversionError(f"its input `{value.name}` is not a constant")
        return [int(n) for n in np.atleast_1d(tensor.numpy())]

    def check_only_first_output(self) -> None:
        """Raise ConversionError if an output other than the first is used."""
        if any(output.uses() or output.is_graph_output() for output in self.node.outputs[1:]):
            raise ConversionError("an output other than the first is used")

    def replace_by(self, *results: ir.Value) -> None:
        """Replace the original node by the written nodes, and its first outputs by `results`."""
        graph = self.node.graph
        assert graph is not None
        outputs = list(self.node.outputs[: len(results)])
        ir.convenience.replace_nodes_and_values(
            graph, self.node, [self.node], self.nodes, outputs, list(results)
        )


Convert = Callable[[NodeWriter], ir.Value]
CONVERTERS: dict[str, Convert] = {}  # operator -> its conversion


def _converts(*operators: str) -> Callable[[Convert], Convert]:
    def register(convert: Convert) -> Convert:
        CONVERTERS.update(dict.fromkeys(operators, convert))
        return convert

    return register


@_converts("LayerNormalization")
def _layer_normalization(s: NodeWriter) -> ir.Value:
    """Write (x - mean) / sqrt(variance + epsilon) * scale + bias, computed in float32 as in the original.

    The nodes are those that torch's older exporter writes, which other compilers' parsers recognize.
    """
    s.check_only_first_output()
    axis = s.attribute("axis", -1) % len(s.shape)
    wide = ir.DataType.DOUBLE if s.x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    axes = list(range(axis, len(s.shape)))
    mean_shape = [*s.shape[:axis], *(1 for _ in axes)]

    def mean_of(value: ir.Value) -> ir.Value:
        return s.write("ReduceMean", value, shape=mean_shape, dtype=wide, axes=axes, keepdims=1)

    x = s.x if s.x.dtype == wide else s.write("Cast", s.x, dtype=wide, to=wide.value)
    centred = s.write("Sub", x, mean_of(x), dtype=wide)
    variance = mean_of(s.write("Pow", centred, s.constant(2, wide), dtype=wide))
    epsilon = s.constant(s.attribute("epsilon", 1e-5), wide)
    padded = s.write("Add", variance, epsilon, shape=mean_shape, dtype=wide)
    deviation = s.write("Sqrt", padded, shape=mean_shape, dtype=wide)
    y = s.write("Div", centred, deviation, dtype=wide)
    if s.x.dtype != wide:
        y = s.write("Cast", y, to=(s.x.dtype or wide).value)
    for operator, operand in zip(("Mul", "Add"), s.node.inputs[1:3], strict=False):
        y = s.write(operator, y, operand) if operand is not None else y
    return y


@_converts("Gelu")
def _gelu(s: NodeWriter) -> ir.Value:
    """Write x (1 + erf(x / √2)) / 2, or the tanh approximation of it."""
    if s.attribute("approximate", "none") == "tanh":
        cube = s.write("Mul", s.write("Mul", s.x, s.x), s.x)
        inner = s.write("Add", s.x, s.write("Mul", cube, s.constant(0.044715)))
        factor = s.write("Tanh", s.write("Mul", inner, s.constant(math.sqrt(2 / math.pi))))
    else:
        factor = s.write("Erf", s.write("Div", s.x, s.constant(math.sqrt(2))))
    gate = s.write("Add", factor, s.constant(1))
    return s.write("Mul", s.write("Mul", s.x, gate), s.constant(0.5))


@_converts("HardSwish")
def _hard_swish(s: NodeWriter) -> ir.Value:
    return s.write("Mul", s.x, s.write("HardSigmoid", s.x, alpha=1 / 6, beta=0.5))


@_converts("Mish")
def _mish(s: NodeWriter) -> ir.Value:
    return s.write("Mul", s.x, s.write("Tanh", s.write("Softplus", s.x)))


@_converts(*(f"Reduce{how}" for how in ("L1", "L2", "LogSum", "LogSumExp", "Max")))
@_converts(*(f"Reduce{how}" for how in ("Mean", "Min", "Prod", "SumSquare")))
def _reduce(s: NodeWriter) -> ir.Value:
    """Write a reduction with its axes as an attribute; since opset 18 they are an input."""
    if s.x.dtype == ir.DataType.BOOL:
        raise ConversionError("its input is of dtype bool")
    attributes: dict[str, Any] = {"keepdims": s.attribute("keepdims", 1)}
    if axes := s.known(1):
        attributes["axes"] = axes
    elif s.attribute("noop_with_empty_axes", 0):
        return s.write("Identity", s.x)
    shape = s.node.outputs[0].shape
    assert shape is not None
    return s.write(s.node.op_type, s.x, shape=shape.numpy(), **attributes)


@_converts("Pad")
def _pad(s: NodeWriter) -> ir.Value:
    """Write a pad of all axes; before opset 18 the axes cannot be selected."""
    if s.attribute("mode", "constant") == "wrap":
        raise ConversionError("its mode is `wrap`")
    pads, axes, rank = s.known(1), s.known(3), len(s.shape)
    if pads is None or axes is None:
        raise ConversionError("its pads or axes are not given")
    full = [0] * (2 * rank)
    for index, axis in enumerate(axes):
        full[axis % rank] = pads[index]
        full[axis % rank + rank] = pads[index + len(axes)]
    shape = [n + full[i] + full[i + rank] for i, n in enumerate(s.shape)]
    value = s.node.inputs[2]
    amounts = s.constant(full, ir.DataType.INT64)
    inputs = [s.x, amounts] if value is None else [s.x, amounts, value]
    return s.write("Pad", *inputs, shape=shape, mode=s.attribute("mode", "constant"))


@_converts("Reshape")
def _reshape(s: NodeWriter) -> ir.Value:
    """Write a reshape without `allowzero`, which has an effect only if a size is 0."""
    sizes = s.known(1)
    if sizes is None or 0 in sizes:
        raise ConversionError("its shape contains a 0")
    shape = s.node.outputs[0].shape
    assert shape is not None
    return s.write("Reshape", s.x, s.constant(sizes, ir.DataType.INT64), shape=shape.numpy())


@_converts("CastLike")
def _cast_like(s: NodeWriter) -> ir.Value:
    like = s.node.inputs[1]
    assert like is not None
    assert like.dtype is not None
    return s.write("Cast", s.x, dtype=like.dtype, to=like.dtype.value)


@_converts("Trilu")
def _trilu(s: NodeWriter) -> ir.Value:
    """Write a triangular mask as a constant; this is possible because shapes are static."""
    diagonal = (s.known(1) or [0])[0]
    rows = np.ones(s.shape[-2:], bool)
    kept = np.triu(rows, diagonal) if s.attribute("upper", 1) else np.tril(rows, diagonal)
    mask = s.constant(kept, ir.DataType.BOOL)
    if s.x.dtype == ir.DataType.BOOL:
        return s.write("And", s.x, mask)
    return s.write("Where", mask, s.x, s.constant(0))
