"""The decoder's self-attention cache, owned by the host and written in place."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from whisperport.dims import Dims
from whisperport.runner import Array, Binding, Part, Runner
from whisperport.signatures import MASKED, CacheForm, KvLayout

Floats = NDArray[np.float32]


class Cache:
    """Keys and values of the tokens decoded so far, in the form in which the decode programs read them.

    Attributes:
        arrays: `self_k_i` and `self_v_i` for each decoder layer i. In the usual form they are float32, keys
            (H, D, N) and values (H, N, D).
        length: number of tokens stored. The rows after them may be of an earlier decoding, since every
            mask hides them. They are not NaN, infinite or in the millions: a mask is added to scores, so
            it hides what is below 30,000.
        bindings: the programs that read the arrays. They are told of every change.
    """

    def __init__(self, dims: Dims, form: CacheForm | None = None) -> None:
        self._dims, self._form = dims, form or CacheForm()
        self.rows = dims.n_text_ctx
        self.length = 0
        self.keys, self.values = self._layers(self._form.self_k), self._layers(self._form.self_v)
        self.arrays: dict[str, Array] = {
            **{f"self_k_{i}": keys for i, keys in enumerate(self.keys)},
            **{f"self_v_{i}": values for i, values in enumerate(self.values)},
        }
        self.bindings: dict[Runner, Binding] = {}
        self._masked = MASKED[self._form.mask]
        self._step_mask = np.full((1, 1, self.rows + 1), self._masked, self._form.mask)
        self._step_mask[..., self.rows] = 0

    def copy(self) -> "Cache":
        """A cache of its own with the same tokens."""
        copy = Cache(self._dims, self._form)
        copy.copy_of(self)
        return copy

    def copy_of(self, other: "Cache") -> None:
        """Replace the tokens by those of another cache of the same sizes and form."""
        self._write(other.arrays, "self", 0, other.length)
        self._step_mask[:] = other._step_mask
        self.length = other.length

    def clear(self) -> None:
        """Forget every token."""
        self.length = 0
        self._step_mask[..., : self.rows] = self._masked

    def store(self, outputs: Mapping[str, Array], count: int) -> None:
        """Append the first `count` of the new rows that a decode program returned.

        Args:
            outputs: `new_k_i` and `new_v_i` for each layer i: P rows, in the form of the cache.

        Raises:
            ValueError: the cache has no room for them.
        """
        start, end = self.length, self.length + count
        if end > self.rows:
            raise ValueError(f"{end} rows do not fit a cache of {self.rows}")
        self._write(outputs, "new", start, count)
        self._step_mask[..., start:end] = 0
        self.length = end

    def mask(self, new: int) -> Array:
        """(1, new, N + new): each new row sees every stored row, itself, and the new rows before it.

        The mask for one row is a view that the next `store` changes.
        """
        if new == 1:
            return self._step_mask
        mask = np.full((1, new, self.rows + new), self._masked, self._form.mask)
        mask[..., : self.length] = 0
        mask[..., self.rows :] = np.triu(np.full((new, new), self._masked, self._form.mask), 1)
        return mask

    def _layers(self, rows: KvLayout) -> list[Array]:
        shape = rows.shape(self._dims.n_text_head, self._dims.text_head_width, self.rows)
        return [np.zeros(shape, rows.dtype) for _ in range(self._dims.n_text_layer)]

    def _write(self, source: Mapping[str, Array], prefix: str, start: int, count: int) -> None:
        """Copy the first `count` rows of each `PREFIX_k_i` and `PREFIX_v_i` to the rows from `start` on."""
        for kind, axis, layers in (
            ("k", self._form.self_k.axis, self.keys),
            ("v", self._form.self_v.axis, self.values),
        ):
            there, here = _part(axis, 0, count), _part(axis, start, start + count)
            for i, array in enumerate(layers):
                array[here] = source[f"{prefix}_{kind}_{i}"][there]
                for binding in self.bindings.values():
                    binding.changed(f"self_{kind}_{i}", here)


def _part(axis: int, start: int, end: int) -> Part:
    """The rows from `start` to `end` along an axis."""
    return (slice(None),) * axis + (slice(start, end),)
