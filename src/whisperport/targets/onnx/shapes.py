"""The shapes that an ONNX graph states of its tensors."""

from collections.abc import Container
from typing import Any


def stated_shapes(model: Any, names: Container[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of some inputs and tensors between nodes; a size that is not a number is 0.

    Args:
        model: a parsed ONNX model.
        names: of the tensors.
    """
    return {
        value.name: tuple(axis.dim_value for axis in value.type.tensor_type.shape.dim)
        for value in (*model.graph.input, *model.graph.value_info)
        if value.name in names
    }
