"""The decoder's self-attention cache, owned by the host and written in place."""

from collections.abc import Mapping

import numpy as np

from whisperport.program.dims import Dims
from whisperport.program.masks import MASKED
from whisperport.program.runner import Array, Binding, Part, Runner
from whisperport.program.signatures import CacheForm, KvLayout

FEWEST_ROWS = 64  # room of the shortest cache; a program with fewer rows is hardly faster


class Cache:
    """Keys and values of the tokens decoded so far, in the layout that the decode programs read.

    Attributes:
        arrays: `self_k_i` and `self_v_i` for each decoder layer i. In the default layout they are float32,
            keys (H, D, N) and values (H, N, D). `reserve` and `clear` may replace them.
        limit: the largest number of tokens.
        rows: N, the number of tokens for which the arrays have room.
        length: number of tokens stored. The rows after them may hold values of an earlier decoding: every
            mask hides them. These values must be finite, and their scores must be so low that the mask
            hides them: see `whisperport.program.masks`.
        bindings: the programs that read the arrays. Those that copy them are notified of every change.
    """

    def __init__(
        self,
        dims: Dims,
        form: CacheForm | None = None,
        step_mask: float = MASKED,
        arrays: Mapping[str, Array] | None = None,
        *,
        grows: bool = False,
    ) -> None:
        """
        Args:
            dims: sizes of the model.
            form: layouts and dtypes of the arrays; None: the default layouts, in float32.
            step_mask: number that hides a token from the `step` program.
            arrays: the arrays to use, zero or finite: `self_k_i`, `self_v_i`, and `mask` (1, 1, N + 1);
                None: new ones.
            grows: whether new arrays have room for few tokens at first; False: for `limit`.
        """
        self._dims, self._form = dims, form or CacheForm()
        self.limit = dims.n_text_ctx
        self.length = 0
        self.bindings: dict[Runner, Binding] = {}
        self._step_masked = step_mask
        self._grows = grows
        self.use(arrays or self._new_arrays(room_for(0, self.limit) if grows else self.limit))

    def copy(self) -> "Cache":
        """Return a separate cache with the same tokens."""
        copy = Cache(self._dims, self._form, self._step_masked, grows=self._grows)
        copy.copy_of(self)
        return copy

    def copy_of(self, source: "Cache") -> None:
        """Replace the tokens by those of another cache of the same sizes, layout and mask."""
        self._forget()
        self.reserve(source.length)
        self._write(source.arrays, "self", 0, source.length)
        self._append(source.length)

    def clear(self) -> None:
        """Remove all tokens."""
        self._forget()
        fewest = room_for(0, self.limit)
        if self._grows and self.rows > fewest:
            self.use(self._new_arrays(fewest))

    def reserve(self, count: int) -> None:
        """Make room for `count` tokens in total; those stored stay.

        Raises:
            ValueError: `count` is above `limit`.
        """
        if count > self.limit:
            raise ValueError(f"{count} tokens do not fit into a cache of {self.limit}")
        if count > self.rows:
            self._grow(room_for(count, self.limit))

    def store(self, outputs: Mapping[str, Array], count: int) -> None:
        """Append the first `count` tokens of the outputs of a decode program.

        Args:
            outputs: `new_k_i` and `new_v_i` for each layer i: P tokens, in the layout of the cache.
            count: number of tokens to append, at most P.

        Raises:
            ValueError: the cache has no room for them.
        """
        self.reserve(self.length + count)
        self._write(outputs, "new", self.length, count)
        self._append(count)

    @property
    def step_mask(self) -> Array:
        """The attention mask of the `step` program, (1, 1, N + 1): a view that the next `store` changes."""
        return self._step_mask

    def mask(self, new: int, masked: float = MASKED) -> Array:
        """Return the attention mask for `new` tokens, (1, new, N + new).

        Each new token attends to the stored tokens, to itself and to the new tokens before it.

        Args:
            new: number of tokens.
            masked: number that hides a token from the program.
        """
        mask = np.full((1, new, self.rows + new), masked, self._form.mask)
        mask[..., : self.length] = 0
        mask[..., self.rows :] = np.triu(np.full((new, new), masked, self._form.mask), 1)
        return mask

    @property
    def is_copied(self) -> bool:
        """Whether a program has copies of the arrays, so that it must be notified of changes."""
        return any(binding.copies for binding in self.bindings.values())

    def notify(self, name: str, part: Part) -> None:
        """Tell every program that reads an array of this cache that a part of it was written."""
        for binding in self.bindings.values():
            binding.changed(name, part)

    def use(self, arrays: Mapping[str, Array]) -> None:
        """Use other arrays, which hold the stored tokens already, and bind them to the programs.

        Args:
            arrays: `self_k_i`, `self_v_i`, and `mask` (1, 1, N + 1).
        """
        layers = range(self._dims.n_text_layer)
        self.arrays = {name: array for name, array in arrays.items() if name != "mask"}
        self._layers = {
            (prefix, kind): [
                (arrays[name], name, f"{prefix}_{kind}_{i}")
                for i in layers
                for name in [f"self_{kind}_{i}"]
            ]
            for prefix in ("self", "new")
            for kind in ("k", "v")
        }
        self._step_mask = arrays["mask"]
        self.rows = self._step_mask.shape[-1] - 1
        self._step_mask[..., : self.length] = 0
        self._step_mask[..., self.length : self.rows] = self._step_masked
        for binding in self.bindings.values():
            for name, array in self.arrays.items():
                binding.bind(name, array)

    def _grow(self, rows: int) -> None:
        """Replace the arrays by longer ones with the same tokens."""
        before = self.arrays
        self.use(self._new_arrays(rows))
        self._write(before, "self", 0, self.length)

    def _forget(self) -> None:
        """Hide all tokens from `step`; the room for them stays."""
        self.length = 0
        self._step_mask[..., : self.rows] = self._step_masked

    def _append(self, count: int) -> None:
        """Count tokens that were written after those stored, and let `step` attend to them."""
        end = self.length + count
        self._step_mask[..., self.length : end] = 0
        self.length = end

    def _new_arrays(self, rows: int) -> dict[str, Array]:
        """Return zero-filled arrays: `self_k_i` and `self_v_i` for each decoder layer i, and `mask`."""
        dims, form = self._dims, self._form

        def layers(name: str, layout: KvLayout) -> dict[str, Array]:
            shape = layout.shape(dims.n_text_head, dims.text_head_width, rows)
            return {f"{name}_{i}": np.zeros(shape, layout.dtype) for i in range(dims.n_text_layer)}

        mask = np.zeros((1, 1, rows + 1), form.mask)
        return {**layers("self_k", form.self_k), **layers("self_v", form.self_v), "mask": mask}

    def _write(self, source: Mapping[str, Array], prefix: str, start: int, count: int) -> None:
        """Copy the first `count` rows of each `PREFIX_k_i` and `PREFIX_v_i` to row `start` and after."""
        copied = self.is_copied
        for kind, axis in (("k", self._form.self_k.axis), ("v", self._form.self_v.axis)):
            read, written = _part(axis, 0, count), _part(axis, start, start + count)
            for array, name, source_name in self._layers[prefix, kind]:
                array[written] = source[source_name][read]
                if copied:
                    self.notify(name, written)


def room_for(count: int, limit: int) -> int:
    """Return the length of the shortest cache for `count` tokens: FEWEST_ROWS, twice that, ..., `limit`."""
    room = FEWEST_ROWS
    while room < count:
        room *= 2
    return min(room, limit)


def _part(axis: int, start: int, end: int) -> Part:
    """Return the index of the rows from `start` to `end` along an axis."""
    return (slice(None),) * axis + (slice(start, end),)
