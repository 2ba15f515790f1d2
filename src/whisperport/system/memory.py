"""Memory for the large arrays that a step reads: weights, and the keys and values of the audio."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

BLOCK = 2**26  # bytes of a block; a part that is not used is not in memory
ALIGNMENT = 64  # bytes of a cache line, which vector instructions should not cross


class Memory:
    """Takes memory in large blocks and gives parts of it to arrays.

    For blocks of 4 MiB or more, NumPy asks Linux for huge pages. With pages of 4 KiB, a step reads so many
    that the CPU no longer knows where those of everything else are, and looks them up again after the step.
    """

    def __init__(self, block: int = BLOCK) -> None:
        """
        Args:
            block: bytes of a block; for a larger array, its size.
        """
        self._block = block
        self._rest = np.empty(0, np.uint8)

    def array(self, shape: Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return a new array, not initialized, whose memory begins at the beginning of a cache line."""
        needed = room(shape, dtype)
        if self._rest.size < needed:
            self._rest = np.empty(max(needed, self._block), np.uint8)
        start = -self._rest.ctypes.data % ALIGNMENT
        end = start + needed - ALIGNMENT
        array = self._rest[start:end].view(dtype).reshape(shape)
        self._rest = self._rest[end:]
        return array


def room(shape: Sequence[int], dtype: DTypeLike = np.float32) -> int:
    """Return how many bytes of a block an array needs at most."""
    return math.prod(shape) * np.dtype(dtype).itemsize + ALIGNMENT
