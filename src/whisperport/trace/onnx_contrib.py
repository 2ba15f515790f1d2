"""Operators of ONNX Runtime that ONNX does not have.

Source: onnxruntime docs/ContribOperators.md.
"""

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
import torch
from onnx.defs import OpSchema
from onnxscript.values import Op, Opset

import whisperport.model.coarse_projection

assert whisperport.model.coarse_projection  # it registers the torch operator

DOMAIN = Opset("com.microsoft", 1)
_ATTRIBUTES = ("K", "N", "bits", "block_size", "accuracy_level")
_MATMUL = OpSchema(
    "MatMulNBits",
    DOMAIN.domain,
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
    return Op(DOMAIN, "MatMulNBits", _MATMUL)(x, weight, scales, **sizes, bits=8, accuracy_level=4)


# An operator of torch -> the function that writes it, for `torch.onnx.export`.
TRANSLATIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.whisperport.matmul_8bits.default: _matmul_8bits
}
