"""Layouts: the orders in which a device can store the values of a tensor."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import numpy as np

from whisperport.program.runner import Array
from whisperport.verification.diagnosis.causes import CauseCode, Finding

ALIGNMENTS = (4, 8, 16, 32, 64, 128, 256)  # an axis is padded to a multiple of one of these
TILES = (4, 8, 16, 32, 64, 128)  # channels in one tile of NC1HWC2 and similar layouts
_NAMES = {
    1: ("int8", "uint8"),
    2: ("float16", "int16", "uint16", "bfloat16"),
    4: ("float32",),
    8: ("float64",),
}  # bytes of a value -> dtypes
LONGEST = 6  # explanations of a size that are listed
MAX_RANK = 4  # of a tensor without its axes of size 1; others are only read in order


@dataclass(frozen=True, slots=True)
class Layout:
    """How the values of a tensor are stored in a file.

    Attributes:
        shape: shape of the tensor, without axes of size 1.
        split: (axis, c) if this axis is cut into tiles of c values; None: no axis is.
        order: storage axis -> axis of the tensor, after the split.
        padded: size of every storage axis in the file, with padding.
        findings: the causes that this layout implies; empty if it is the expected one.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    padded: tuple[int, ...]
    split: tuple[int, int] | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def size(self) -> int:
        """Number of values in the file, with padding."""
        return math.prod(self.padded)

    @property
    def has_padding(self) -> bool:
        """Whether some values in the file belong to no value of the tensor."""
        return self.size > math.prod(self.shape)

    def pick(self, values: Array) -> Array:
        """Return the tensor's values in the order of the file, without padding: (n,)."""
        return self._stored(values).reshape(-1)

    def arrange(self, tensor: Array) -> Array:
        """Return the values of a tensor in the order of the file, without padding: (n,)."""
        return tensor.reshape(self._split_shape).transpose(self.order).reshape(-1)

    def restore(self, picked: Array) -> Array:
        """Return the tensor whose values `pick` or `arrange` returned, in `shape`."""
        stored = picked.reshape(tuple(self._split_shape[axis] for axis in self.order))
        return stored.transpose(np.argsort(self.order)).reshape(self.shape)

    def view(self, values: Array) -> Array:
        """Return the values of a file as a tensor of `shape`; a view if the axes are not split."""
        return self._stored(values).transpose(np.argsort(self.order)).reshape(self.shape)

    def code(self) -> tuple[str, ...]:
        """Return lines of numpy that make the tensor from the values `x` of the file."""
        lines = [f"x = x[:{self.size}].reshape({_shown(self.padded)})"]
        if self.has_padding:
            sizes = [self._split_shape[axis] for axis in self.order]
            lines.append(f"x = x[{', '.join(f':{size}' for size in sizes)}]")
        back = tuple(int(axis) for axis in np.argsort(self.order))
        if back != tuple(range(len(back))):
            lines.append(f"x = x.transpose({_shown(back)})")
        return tuple(lines)

    @property
    def _split_shape(self) -> tuple[int, ...]:
        if self.split is None:
            return self.shape
        axis, c = self.split
        return (*self.shape[:axis], self.shape[axis] // c, c, *self.shape[axis + 1 :])

    def _stored(self, values: Array) -> Array:
        stored = values[: self.size].reshape(self.padded)
        if self.has_padding:
            stored = stored[tuple(slice(self._split_shape[axis]) for axis in self.order)]
        return stored


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without axes of size 1; (1,) if there is no other."""
    return tuple(size for size in shape if size > 1) or (1,)


@lru_cache(maxsize=256)
def layouts_of(shape: tuple[int, ...], count: int) -> tuple[Layout, ...]:
    """Return every layout of a tensor that fills a file of `count` values.

    Args:
        shape: shape of the tensor, without axes of size 1.
        count: number of values in the file.
    """
    layouts = [layout for layout in _unpadded(shape) if layout.size == count]
    if not layouts and count > math.prod(shape):
        layouts = list(_padded_to(shape, count))
    return tuple(dict.fromkeys(layouts))


@lru_cache(maxsize=256)
def common_layouts(shape: tuple[int, ...]) -> tuple[Layout, ...]:
    """Return the layouts that are tried with files that are too short or too long."""
    layouts = list(_unpadded(shape))
    for order in _orders(shape):
        sizes = tuple(shape[axis] for axis in order)
        for position in range(1, len(sizes)):  # padding of the outermost axis is at the end
            for padded in _aligned(sizes[position]):
                layouts.append(_padded(shape, order, {position: padded}))
    return tuple(dict.fromkeys(layouts))


def _unpadded(shape: tuple[int, ...]) -> Iterator[Layout]:
    for order in _orders(shape):
        yield _padded(shape, order, {})
    if 2 <= len(shape) <= MAX_RANK:
        yield from _tiled(shape)


def _orders(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    axes = range(len(shape))
    yield from permutations(axes) if len(shape) <= MAX_RANK else iter([tuple(axes)])


def _tiled(shape: tuple[int, ...]) -> Iterator[Layout]:
    for axis in reversed(range(len(shape))):
        rest = tuple(a + (a > axis) for a in range(len(shape)) if a != axis)
        for c in TILES:
            if shape[axis] % c or shape[axis] == c:
                continue
            order = (axis, *rest, axis + 1)
            findings = [_tile_finding(shape, axis, c)]
            if axis != len(shape) - 1:
                moved = (*(a for a in range(len(shape)) if a != axis), axis)
                findings.insert(0, _order_finding(shape, moved))
            split = (*shape[:axis], shape[axis] // c, c, *shape[axis + 1 :])
            padded = tuple(split[a] for a in order)
            yield Layout(shape, order, padded, (axis, c), tuple(findings))


def _padded_to(shape: tuple[int, ...], count: int) -> Iterator[Layout]:
    """Yield the layouts with one padded axis, or with two axes padded to one alignment."""
    for order in _orders(shape):
        sizes = tuple(shape[axis] for axis in order)
        for position in reversed(range(len(sizes))):
            rest = math.prod(sizes) // sizes[position]
            if count % rest == 0 and count // rest in _aligned(sizes[position]):
                yield _padded(shape, order, {position: count // rest})
        for alignment in ALIGNMENTS:
            padded = [-(-size // alignment) * alignment for size in sizes]
            for first in range(len(sizes)):
                for second in range(first):
                    aligned_sizes = {first: padded[first], second: padded[second]}
                    layout = _padded(shape, order, aligned_sizes)
                    if layout.size == count and all(
                        aligned_sizes[p] > sizes[p] for p in aligned_sizes
                    ):
                        yield layout


def _aligned(size: int) -> tuple[int, ...]:
    return tuple(sorted({-(-size // a) * a for a in ALIGNMENTS} - {size}))


def _padded(shape: tuple[int, ...], order: tuple[int, ...], padding: dict[int, int]) -> Layout:
    sizes = tuple(padding.get(p, shape[axis]) for p, axis in enumerate(order))
    findings = []
    if order != tuple(range(len(order))):
        findings.append(_order_finding(shape, order))
    changed = [
        (shape[axis], size) for axis, size in zip(order, sizes, strict=True) if size != shape[axis]
    ]
    if changed:
        findings.append(_padding_finding(changed, sizes))
    return Layout(shape, order, sizes, None, tuple(findings))


def _order_finding(shape: tuple[int, ...], order: tuple[int, ...]) -> Finding:
    stored = tuple(shape[axis] for axis in order)
    return Finding(
        cause=CauseCode.AXES_PERMUTED,
        sentence=f"The values are stored as {_shown(stored)}, not as {_shown(shape)}.",
        advice="Transpose the array, or let the compiler write the output in the model's layout.",
    )


def _padding_finding(changed: list[tuple[int, int]], stored: tuple[int, ...]) -> Finding:
    axes = " and ".join(f"the axis of {size} is padded to {padded}" for size, padded in changed)
    return Finding(
        cause=CauseCode.PADDED_AXIS,
        sentence=f"{axes[0].upper()}{axes[1:]}: the file holds {_shown(stored)}.",
        advice="Cut the padding, or let the compiler write the output without its internal layout.",
    )


def _tile_finding(shape: tuple[int, ...], axis: int, c: int) -> Finding:
    sizes = [str(size) for a, size in enumerate(shape) if a != axis]
    stored = f"({shape[axis] // c}, {', '.join(sizes)}, {c})"
    return Finding(
        cause=CauseCode.CHANNEL_TILES,
        sentence=f"The axis of {shape[axis]} is stored in tiles of {c}: the file holds {stored}.",
        advice="Join the tiles, or let the compiler write the output without its internal layout.",
    )


def _shown(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def explain_size(size: int, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return what a file of `size` bytes can hold of an output, the simplest explanation first.

    Args:
        size: bytes of the file.
        name: name of the output.
        shape: its shape.
    """
    count = math.prod(shape)
    product = " x ".join(map(str, squeezed(shape)))
    exact, padded = [], []
    for itemsize, names in _NAMES.items():
        values = size // itemsize
        if size % itemsize or not values:
            continue
        either = " or ".join(names)
        if values == count:
            exact.append(
                f"{size:,} bytes are exactly {product} values of {itemsize} byte(s) each: `{name}` as "
                f"{either}."
            )
        elif values > count and values < 4 * count + 1024:
            for layout in layouts_of(squeezed(shape), values)[:2]:
                stored = " x ".join(map(str, layout.padded))
                padded.append(
                    f"{size:,} bytes are {stored} values of {itemsize} byte(s): `{name}` as {either}, "
                    "with padding."
                )
    sentences = [*exact, *padded][:LONGEST]
    if not sentences:
        full = 4 * count
        sentences.append(
            f"{size:,} bytes fit no dtype and layout of `{name}`, which has {product} values: {full:,} "
            f"bytes in float32, {count:,} bytes in int8; the file is {size / full:.3g} times the float32 "
            "size."
        )
    return tuple(sentences)
