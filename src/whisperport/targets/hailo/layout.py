"""How Hailo's tools lay out arrays: height, width, channels, where a program has channels first."""

from collections.abc import Sequence

import numpy as np

from whisperport.runner import Array


def as_stream(array: Array) -> Array:
    """One sample, without the batch: (1, C, H, W) as (H, W, C), and (1, T, C) as it is.

    float32, C-contiguous and writable: HailoRT takes the address of a buffer, and asks for both.
    """
    moved = array[0].transpose(1, 2, 0) if array.ndim == 4 else array
    return np.require(moved, np.float32, ["C", "W"])


def stream_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """What `as_stream` makes of a shape."""
    return (shape[2], shape[3], shape[1]) if len(shape) == 4 else shape


def results_of(outputs: Sequence[str], wanted: int) -> list[str]:
    """The outputs that hold results, in the compiler's order.

    Published decoders have others beside the four pieces of the logits, whose names hold `conv`.
    """
    return [name for name in outputs if len(outputs) == wanted or "conv" in name]
