"""What the changes of ONNX graphs for ONNX Runtime share: lookups in a parsed model, and edits of it.

Source of the numbers of dtypes and kinds of attributes: onnx/onnx.proto.
"""

from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from whisperport.program.bundle.onnx_graph import CACHED, CACHED_AND_NEW

FLOAT, UINT8, INT8, INT32, INT64, HALF = 1, 2, 3, 6, 7, 10  # TensorProto.DataType
FLOAT_ATTRIBUTE, INT_ATTRIBUTE, INTS_ATTRIBUTE = 1, 2, 7  # AttributeProto.AttributeType


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


def uses_of(model: Any) -> Counter[str]:
    """Count how often each tensor is read by a node or returned."""
    uses = Counter(name for node in model.graph.node for name in node.input)
    uses.update(value.name for value in model.graph.output)
    return uses


def has_inner_graphs(model: Any) -> bool:
    """Whether a node contains a graph, such as a branch of an If; it may read any tensor."""
    return any(a.HasField("g") or a.graphs for n in model.graph.node for a in n.attribute)


def add_integers(model: Any, name: str, values: Sequence[int]) -> str:
    """Add a row of integers to the initializers of a graph, and return its name."""
    array = np.array(values, "<i8")
    model.graph.initializer.add(
        name=name, data_type=INT64, dims=array.shape, raw_data=array.tobytes()
    )
    return name


def forget(model: Any, names: Container[str]) -> None:
    """Remove what a graph states of tensors that have other shapes now, or do not exist any more."""
    stated = model.graph.value_info
    for index in reversed(range(len(stated))):
        if stated[index].name in names:
            del stated[index]


def free_caches(model: Any) -> bool:
    """Let a graph read caches with room for fewer tokens than their signatures state.

    A text rarely has as many tokens as the cache has room for. The exporter has shown that nothing but the
    axes with these denotations depends on the room. They are made free here and not in the file, which
    stays static for other execution providers.

    Args:
        model: a parsed ONNX model, which is changed if the result is True.

    Returns:
        Whether it has such axes.
    """
    axes = cache_axes(model)
    for value in model.graph.input:
        if value.name in axes:
            size = value.type.tensor_type.shape.dim[axes[value.name]]
            size.dim_value, size.dim_param = 0, size.denotation
    forget(
        model, {value.name for value in model.graph.value_info if _cache_axis(value) is not None}
    )
    return bool(axes)


def cache_axes(model: Any) -> dict[str, int]:
    """Return the inputs with an axis of N or of N + P tokens that may have any size: name -> axis."""
    axes = {value.name: _cache_axis(value) for value in model.graph.input}
    return {name: axis for name, axis in axes.items() if axis is not None}


def _cache_axis(value: Any) -> int | None:
    denotations = [axis.denotation for axis in value.type.tensor_type.shape.dim]
    return next((i for i, d in enumerate(denotations) if d in (CACHED, CACHED_AND_NEW)), None)


def integers(model: Any) -> dict[str, list[int]]:
    """Return the 64-bit integers of initializers that are in the graph itself."""
    return {
        tensor.name: np.frombuffer(tensor.raw_data, "<i8").tolist()
        for tensor in model.graph.initializer
        if tensor.data_type == INT64 and tensor.raw_data and len(tensor.raw_data) % 8 == 0
    }
