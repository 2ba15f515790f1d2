"""Store the weights of matrix multiplications in 8 bits, in the form that ONNX Runtime's CPU multiplies by.

    before   x ── MatMul(W float32 (K, N)) ────────────────────────────────────────► y
    after    x ── MatMulNBits(uint8 (N, K/128, 128), scales float32 (N, K/128)) ───► y

A step then reads a quarter of the bytes. With `accuracy_level` 4 the operator rounds x to 8 bits too, in
the same blocks, so that a massive activation coarsens only its own block. The other levels compute in
float32, but expand the whole weight in each run, which is slower than float32 weights. Smaller blocks have
less error (3 dB for blocks of 32) and are slower. DequantizeLinear and MatMul, ONNX's own form, become the
same operator with blocks of 32 when ONNX Runtime 1.32 loads them; older versions expand them to float32.

`TRANSLATIONS` writes the same operator for torch's `whisperport.matmul_8bits`. Source of the operator:
onnxruntime docs/ContribOperators.md.
"""

import math
from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx.defs import OpSchema
from onnxscript.values import Op, Opset

import whisperport.model.network.coarse_projection

DOMAIN = "com.microsoft"
LARGEST_BLOCK, SMALLEST_BLOCK = 128, 16  # weights of a column that share a scale
SMALLEST_WEIGHT = 4096  # values; smaller weights stay in float32
LARGEST, ZERO = 127, 128  # the largest absolute value in 8 bits; how the weight 0 is stored


def store_in_8_bits(model: ir.Model, names: Container[str] | None = None) -> int:
    """Replace every MatMul by a constant matrix, and every plain Gemm, in place.

    Args:
        model: with the weights of its Gemms as (K, N).
        names: nodes that may be replaced. Default: None, all.

    Returns:
        The number of nodes that were replaced.
    """
    graph, stored = model.graph, dict[str, tuple[ir.Value, ir.Value] | None]()
    replaced = 0
    for node in list(graph):
        weight = node.inputs[1] if len(node.inputs) > 1 else None
        if weight is None or not weight.is_initializer() or not _multiplies(node):
            continue
        if names is not None and node.name not in names:
            continue
        name = str(weight.name)
        if name not in stored:
            stored[name] = _stored(graph, weight)
        if (parts := stored[name]) is not None:
            _replace(graph, node, *parts)
            replaced += 1
    for name in [name for name in stored if not graph.initializers[name].uses()]:
        graph.initializers.pop(name)
    if replaced:
        model.opset_imports[DOMAIN] = 1
    return replaced


def in_blocks(
    weight: NDArray[np.float32], block: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Round a weight (K, N) to 255 levels, and return it as (N, K / block, block) with its scales."""
    blocks = weight.T.reshape(weight.shape[1], -1, block)
    scales = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(LARGEST)
    scales[scales == 0] = 1
    levels = np.rint(blocks / scales) + ZERO
    return levels.astype(np.uint8), scales[:, :, 0]


def _multiplies(node: ir.Node) -> bool:
    """Whether a node is x W, or a Gemm that is x W + bias."""
    if node.op_type == "MatMul":
        return True
    factors = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    return node.op_type == "Gemm" and {**factors, **attributes} == factors


def _stored(graph: ir.Graph, weight: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Add a weight in 8 bits and its scales to a graph; return None if it stays as it is."""
    if weight.const_value is None or weight.const_value.dtype != ir.DataType.FLOAT:
        return None
    array = weight.const_value.numpy()
    if array.ndim != 2 or array.size < SMALLEST_WEIGHT:
        return None
    block = math.gcd(array.shape[0], LARGEST_BLOCK)
    if block < SMALLEST_BLOCK:
        return None
    levels, scales = in_blocks(array, block)
    return _add(graph, f"{weight.name}_8bits", levels), _add(graph, f"{weight.name}_scales", scales)


def _add(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    graph.initializers[name] = ir.Value(
        name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    return graph.initializers[name]


def _replace(graph: ir.Graph, node: ir.Node, levels: ir.Value, scales: ir.Value) -> None:
    """Put a MatMulNBits in the place of a node, with the bias of a Gemm."""
    assert levels.shape is not None
    columns, blocks, block = levels.shape.numpy()
    bias = list(node.inputs[2:])
    attributes = {"K": blocks * block, "N": columns, "block_size": block, "bits": 8}
    matmul = ir.node(
        "MatMulNBits",
        [node.inputs[0], levels, scales, *([None, None, *bias] if bias else [])],
        {**attributes, "accuracy_level": 4},
        domain=DOMAIN,
        name=node.name,
    )
    output, original = matmul.outputs[0], node.outputs[0]
    output.name, output.shape, output.type = original.name, original.shape, original.type
    ir.convenience.replace_nodes_and_values(graph, node, [node], [matmul], [original], [output])


assert whisperport.model.network.coarse_projection  # it registers the torch operator

ONNX_RUNTIME = Opset(DOMAIN, 1)
_ATTRIBUTES = ("K", "N", "bits", "block_size", "accuracy_level")
_MATMUL = OpSchema(
    "MatMulNBits",
    ONNX_RUNTIME.domain,
    1,
    inputs=[
        OpSchema.FormalParameter("A", "T1"),
        OpSchema.FormalParameter("B", "T2"),
        OpSchema.FormalParameter("scales", "T1"),
    ],
    outputs=[OpSchema.FormalParameter("Y", "T1")],
    type_constraints=[("T1", ["tensor(float)"], ""), ("T2", ["tensor(uint8)"], "")],
    attributes=[OpSchema.Attribute(name, OpSchema.AttrType.INT) for name in _ATTRIBUTES],
)


def _matmul_8bits(x: ir.Value, weight: ir.Value, scales: ir.Value) -> Any:
    """Write `model.coarse_projection.matmul_8bits`.

    With `accuracy_level` 4, ONNX Runtime quantizes x to 8 bits too, and multiplies integers.
    """
    assert weight.shape is not None
    rows, blocks, block = weight.shape.numpy()
    sizes = {"K": blocks * block, "N": rows, "block_size": block}
    return Op(ONNX_RUNTIME, "MatMulNBits", _MATMUL)(
        x, weight, scales, **sizes, bits=8, accuracy_level=4
    )


# An operator of torch -> the function that writes it, for `torch.onnx.export`.
TRANSLATIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.whisperport.matmul_8bits.default: _matmul_8bits
}
