"""Store the weights of matrix multiplications in int8, with one scale per output channel.

    before   x ── MatMul(w float32) ─────────────────────────────────► y
    after    x ── MatMul(Multiply(Convert(q int8), scale float32)) ──► y

OpenVINO reads this form as compressed weights: its CPU kernels multiply int8 weights by float32 inputs and
do not expand the weights in memory.

Source of the form: openvino, `MarkDequantization` and the CPU plugin's conversion of compressed
MatMuls; NNCF writes it too, but NNCF needs scipy and scikit-learn.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALLEST = 4096  # elements; smaller weights cost little memory
LARGEST_INT8 = 127


def store_in_int8(model: Any) -> int:
    """Replace the constant weights of all matrix multiplications of an `openvino.Model`, in place.

    Returns:
        The number of weights that were replaced.
    """
    replaced = 0
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul":
            continue
        for port, transposed in ((0, "transpose_a"), (1, "transpose_b")):
            constant = node.input_value(port).get_node()
            if constant.get_type_name() != "Constant" or constant.data.size < SMALLEST:
                continue
            # The last axis but one is summed over in the second input, the last in the first input.
            summed = -2 + (port == 0) * 1
            if node.get_attributes()[transposed]:
                summed = -3 - summed
            node.input(port).replace_source_output(_in_int8(constant.data, summed))
            replaced += 1
    return replaced


def _in_int8(weights: NDArray[np.float32], summed: int) -> Any:
    """Return the output of the nodes that compute the weights from int8.

    Args:
        summed: axis of the weights that the multiplication sums over, -1 or -2.
    """
    from openvino import opset13

    scale = np.abs(weights).max(axis=summed, keepdims=True) / LARGEST_INT8
    scale[scale == 0] = 1
    quantized = np.rint(weights / scale).astype(np.int8)
    converted = opset13.convert(opset13.constant(quantized), "f32")
    return opset13.multiply(converted, opset13.constant(scale.astype(np.float32))).output(0)
