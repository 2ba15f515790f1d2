"""Convert between the layout of programs, channels first, and that of Hailo's tools, channels last."""

from collections.abc import Sequence

import numpy as np

from whisperport.program.runner import Array
from whisperport.program.spec import TensorSpec

Shape = tuple[int, ...]


def as_stream(array: Array) -> Array:
    """Convert one sample: (1, C, H, W) becomes (H, W, C); (1, T, C) does not change.

    Returns:
        A float32 array that is C-contiguous and writable, as HailoRT requires of a buffer.
    """
    moved = array[0].transpose(1, 2, 0) if array.ndim == 4 else array
    return np.require(moved, np.float32, ["C", "W"])


def stream_shape(shape: Shape) -> Shape:
    """Return the shape that `as_stream` returns for an array of this shape."""
    return (shape[2], shape[3], shape[1]) if len(shape) == 4 else shape


def without_unit_axes(shape: Shape) -> Shape:
    """Remove axes of length 1, which do not change the order of values: (1, T, C) becomes (T, C)."""
    return tuple(size for size in shape if size != 1)


def matches(stream: Shape, tensor: TensorSpec) -> bool:
    """Whether a stream of this shape holds the values of a program's tensor in the same order.

    The embeddings of the uncached decoder must have exactly the expected shape. There are two published
    forms of this decoder: (S, 1, d) without positions and (1, S, d) with positions added in the graph.
    """
    expected = stream_shape(tensor.shape)
    if tensor.name == "embeddings":
        return stream == expected
    return without_unit_axes(stream) == without_unit_axes(expected)


def all_match(streams: Sequence[Shape], tensors: Sequence[TensorSpec]) -> bool:
    """Whether each stream matches one of the tensors; the order of the streams does not matter."""
    unmatched = list(streams)
    # `embeddings` comes first, since it has the strictest condition.
    for tensor in sorted(tensors, key=lambda spec: spec.name != "embeddings"):
        stream = next((shape for shape in unmatched if matches(shape, tensor)), None)
        if stream is None:
            return False
        unmatched.remove(stream)
    return not unmatched


def result_outputs(outputs: Sequence[str], count: int) -> list[str]:
    """Select the outputs that are results, in the compiler's order.

    Published decoders have outputs besides the four pieces of the logits. The names of the logits contain
    `conv`.

    Args:
        outputs: names of the network's outputs.
        count: number of outputs of the program.
    """
    return [name for name in outputs if len(outputs) == count or "conv" in name]
