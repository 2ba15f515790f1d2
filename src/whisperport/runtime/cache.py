"""The decoder's self-attention cache, owned by the host and written in place."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from whisperport.dims import Dims

MASKED = np.float32(-30_000)  # exp(MASKED) is 0 in float32, and the value itself fits float16

Floats = NDArray[np.float32]


class Cache:
    """Keys and values of the rows decoded so far, as the decode programs take them.

    arrays  `self_k_i` (H, D, N) and `self_v_i` (H, N, D), float32, for each decoder layer i
    length  rows written; those after it may be of an earlier decoding, since every mask hides them.
            Not NaN, infinite or in the millions: a mask is added, so it hides what is below 30,000
    """

    def __init__(self, dims: Dims) -> None:
        heads, width, rows = dims.n_text_head, dims.text_head_width, dims.n_text_ctx
        self.rows = rows
        self.length = 0
        self.keys = [np.zeros((heads, width, rows), np.float32) for _ in range(dims.n_text_layer)]
        self.values = [np.zeros((heads, rows, width), np.float32) for _ in range(dims.n_text_layer)]
        self.arrays: dict[str, Floats] = {
            **{f"self_k_{i}": keys for i, keys in enumerate(self.keys)},
            **{f"self_v_{i}": values for i, values in enumerate(self.values)},
        }
        self._step_mask = np.full((1, 1, rows + 1), MASKED, np.float32)
        self._step_mask[..., rows] = 0

    def copy_of(self, other: "Cache") -> None:
        """Take the rows of another cache of the same sizes."""
        for mine, theirs in zip(self.keys, other.keys, strict=True):
            mine[:, :, : other.length] = theirs[:, :, : other.length]
        for mine, theirs in zip(self.values, other.values, strict=True):
            mine[:, : other.length] = theirs[:, : other.length]
        self._step_mask[:] = other._step_mask
        self.length = other.length

    def clear(self) -> None:
        """Forget every row."""
        self.length = 0
        self._step_mask[..., : self.rows] = MASKED

    def store(self, outputs: Mapping[str, Floats], count: int) -> None:
        """Append the first `count` of the new rows a decode program returned.

        outputs  `new_k_i` (H, D, P) and `new_v_i` (H, P, D) for each layer i

        Raises:
            ValueError: the cache has no room for them.
        """
        start, end = self.length, self.length + count
        if end > self.rows:
            raise ValueError(f"{end} rows do not fit a cache of {self.rows}")
        for i, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            keys[:, :, start:end] = outputs[f"new_k_{i}"][:, :, :count]
            values[:, start:end] = outputs[f"new_v_{i}"][:, :count]
        self._step_mask[..., start:end] = 0
        self.length = end

    def mask(self, new: int) -> Floats:
        """(1, new, N + new): each new row sees every stored row, itself, and the new rows before it.

        The mask for one row is a view that the next `store` changes.
        """
        if new == 1:
            return self._step_mask
        mask = np.full((1, new, self.rows + new), MASKED, np.float32)
        mask[..., : self.length] = 0
        mask[..., self.rows :] = np.triu(np.full((new, new), MASKED, np.float32), 1)
        return mask
