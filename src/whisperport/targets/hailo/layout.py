"""How Hailo's tools lay out arrays: height, width, channels, where a program has channels first."""

from collections.abc import Sequence

import numpy as np

from whisperport.runner import Array
from whisperport.spec import TensorSpec

Shape = tuple[int, ...]


def as_stream(array: Array) -> Array:
    """One sample, without the batch: (1, C, H, W) as (H, W, C), and (1, T, C) as it is.

    float32, C-contiguous and writable: HailoRT takes the address of a buffer, and asks for both.
    """
    moved = array[0].transpose(1, 2, 0) if array.ndim == 4 else array
    return np.require(moved, np.float32, ["C", "W"])


def stream_shape(shape: Shape) -> Shape:
    """What `as_stream` makes of a shape."""
    return (shape[2], shape[3], shape[1]) if len(shape) == 4 else shape


def without_unit_axes(shape: Shape) -> Shape:
    """The axes that order the values: (1, T, C), (T, 1, C) and (T, C) are three names of one array."""
    return tuple(size for size in shape if size != 1)


def matches(stream: Shape, tensor: TensorSpec) -> bool:
    """Whether a stream of this shape has the values of a program's tensor, in the same order.

    The embeddings of the uncached decoder must have the very shape: (S, 1, d) and (1, S, d) tell the two
    published generations apart, of which one adds the positions itself.
    """
    expected = stream_shape(tensor.shape)
    if tensor.name == "embeddings":
        return stream == expected
    return without_unit_axes(stream) == without_unit_axes(expected)


def all_match(streams: Sequence[Shape], tensors: Sequence[TensorSpec]) -> bool:
    """Whether each stream holds one of the tensors, in whichever order a file lists the streams."""
    left = list(streams)
    for tensor in sorted(tensors, key=lambda one: one.name != "embeddings"):  # the strictest first
        found = next((shape for shape in left if matches(shape, tensor)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def result_outputs(outputs: Sequence[str], wanted: int) -> list[str]:
    """The outputs that hold results, in the compiler's order.

    Published decoders have others beside the four pieces of the logits, whose names hold `conv`.
    """
    return [name for name in outputs if len(outputs) == wanted or "conv" in name]
