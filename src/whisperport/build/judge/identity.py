"""Find the weights of a checkpoint among the arrays of an app's files, bit by bit and under any name.

Converters rename weights, transpose them, store them twice, and round them. So each weight is looked for
among all stored arrays of its shape: first equal to the bit, then rounded to float16, then to integers of
8 bits.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whisperport.build.layouts.arrays import is_half
from whisperport.build.layouts.arrays import weight as weight_of
from whisperport.build.layouts.reading import StoredArray

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

Array = NDArray[Any]
SCALES = (-0.5, -0.25)  # powers of a head's width, by which converters multiply queries and keys
SMALLEST = 2  # elements; a smaller array, such as a shape, is not a weight
HALF_STEP = 0.75  # of a step of 8 bits: half, and what the fit of the step costs (0.64 seen)
MOST = 0.98  # of a row's values: a converter may have clipped the largest
BLOCK = 32  # values of ggml's blocks, which have a step of their own
ROWS = 64  # of an array, by which its levels are found
QUICK = 4  # rows and columns, by which most other weights of the same shape are ruled out
SIMILAR = 0.5  # of a weight's standard deviation: an array farther away is another weight
SAMPLE = 256  # elements, by which the nearest array is found


@dataclass(frozen=True, slots=True)
class ChangedWeight:
    """A weight of the checkpoint that no array equals.

    Attributes:
        name: openai-whisper's.
        stored: file and name of the array that is nearest; empty: none is near.
        n_changed: elements that differ.
        n_elements: of the weight.
        largest: the largest difference, in standard deviations of the weight.
    """

    name: str
    stored: str = ""
    n_changed: int = 0
    n_elements: int = 0
    largest: float = math.inf

    def __str__(self) -> str:
        return f"{self.name}: {self.difference}"

    @property
    def difference(self) -> str:
        """How far it is from what is stored, in words."""
        if not self.stored:
            return "no array is near it"
        return (
            f"{self.n_changed:,} of {self.n_elements:,} values differ from {self.stored}, "
            f"by up to {self.largest:.2g} standard deviations"
        )


@dataclass(slots=True)
class Identity:
    """How the weights of a checkpoint were found again.

    Attributes:
        equal: names of those that are stored bit by bit.
        half: of those that are stored rounded to float16.
        eight_bits: of those that are stored within half a step of 8 bits.
        changed: the others.
        n_arrays: stored arrays that were compared.
    """

    equal: list[str] = field(default_factory=list)
    half: list[str] = field(default_factory=list)
    eight_bits: list[str] = field(default_factory=list)
    changed: list[ChangedWeight] = field(default_factory=list)
    n_arrays: int = 0

    def __bool__(self) -> bool:
        """Whether each weight was found, and there is one."""
        return not self.changed and bool(self.equal or self.half or self.eight_bits)

    def __str__(self) -> str:
        rounded = [
            f"{len(names)} rounded to {form}"
            for names, form in ((self.half, "float16"), (self.eight_bits, "8 bits"))
            if names
        ]
        n_same = len(self.equal) + len(self.half) + len(self.eight_bits)
        counts = ", ".join([f"{len(self.equal)} equal to the bit", *rounded])
        return f"{n_same} of {n_same + len(self.changed)} weights are there ({counts})"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "equal": len(self.equal),
            "float16": len(self.half),
            "eight_bits": len(self.eight_bits),
            "changed": [
                {
                    "name": weight.name,
                    "stored": weight.stored or None,
                    "n_changed": weight.n_changed,
                    "n_elements": weight.n_elements,
                    "largest": weight.largest if weight.stored else None,
                }
                for weight in self.changed
            ],
        }


def identify(checkpoint: "Checkpoint", arrays: Iterable[StoredArray]) -> Identity:
    """Look for each weight of a checkpoint among stored arrays.

    Args:
        checkpoint: its weights are compared one at a time.
        arrays: of the files, one at a time; those of a shape that no weight has are left out.
    """
    search = _Search(checkpoint)
    result = Identity()
    for array in arrays:
        result.n_arrays += search.compare(array)
    for name in checkpoint.weights:
        if name in search.equal:
            result.equal.append(name)
        elif name in search.half:
            result.half.append(name)
        elif name in search.eight_bits:
            result.eight_bits.append(name)
        else:
            result.changed.append(search.nearest.get(name) or ChangedWeight(name))
    return result


class _Search:
    """Compares arrays with the weights of the same shape, or of its transpose."""

    def __init__(self, checkpoint: "Checkpoint") -> None:
        self.checkpoint = checkpoint
        self.equal: set[str] = set()
        self.half: set[str] = set()
        self.eight_bits: set[str] = set()
        self.nearest: dict[str, ChangedWeight] = {}
        self.by_shape: Mapping[tuple[int, ...], list[str]] = defaultdict(list)
        self.digests: dict[tuple[str, bool, str, float], bytes] = {}
        self.halves: dict[str, bool] = {}
        self.head_width = checkpoint.dims.text_head_width
        for name, tensor in checkpoint.weights.items():
            self.by_shape[_squeezed(tuple(tensor.shape))].append(name)

    def compare(self, array: StoredArray) -> bool:
        """Compare an array with every weight that it may be; return whether there is one."""
        shape = _squeezed(array.values.shape)
        candidates = [(name, False) for name in self.by_shape.get(shape, ())]
        if len(shape) == 2:
            candidates += [(name, True) for name in self.by_shape.get(shape[::-1], ())]
        if not candidates or array.values.size < SMALLEST:
            return False
        values = np.ascontiguousarray(array.values).reshape(shape)
        if values.dtype.kind in "iu":
            self._compare_integers(array, values, candidates)
        elif not self._is_equal(values, candidates) and not self._is_rounded(values, candidates):
            self._note_nearest(array, values.astype(np.float32), candidates)
        return True

    def _is_equal(self, values: Array, candidates: list[tuple[str, bool]]) -> bool:
        """Note each weight that an array equals: exactly, else scaled, else rounded to float16."""
        form = "float16" if values.dtype == np.float16 else "float32"
        digest = _digest(values.astype(form, copy=False))
        exact = [c for c in candidates if form == "float32" or self._is_half(c[0])]
        equal = [name for name, swapped in exact if self._digest(name, swapped, form) == digest]
        equal = equal or [
            name
            for name, swapped in exact
            if (".query." in name or ".key." in name)
            and any(self._digest(name, swapped, form, power) == digest for power in SCALES)
        ]
        self.equal.update(equal)
        if equal:
            return True
        rounded = "rounded to " + form
        half = [
            name for name, swapped in candidates if self._digest(name, swapped, rounded) == digest
        ]
        self.half.update(half)
        return bool(half)

    def _compare_integers(
        self, array: StoredArray, values: Array, candidates: list[tuple[str, bool]]
    ) -> None:
        integers = values.astype(np.float32)
        for name, transposed in candidates:
            if name not in self.eight_bits and _is_near(integers, self._weight(name, transposed)):
                self.eight_bits.add(name)
                return

    def _is_rounded(self, values: Array, candidates: list[tuple[str, bool]]) -> bool:
        """Note a weight that an array holds as integers of 8 bits, already multiplied by their step."""
        if values.ndim < 2:
            return False
        for size in {values[0].size, BLOCK}:
            groups = (
                values.astype(np.float32).reshape(-1, size) if values.size % size == 0 else None
            )
            if groups is None or not _has_levels(groups):
                continue
            for name, transposed in candidates:
                weight = self._weight(name, transposed).reshape(-1, size)
                if name not in self.eight_bits and _groups_are_near(groups, weight):
                    self.eight_bits.add(name)
                    return True
        return False

    def _note_nearest(
        self, array: StoredArray, values: Array, candidates: list[tuple[str, bool]]
    ) -> None:
        """Keep the array that is nearest to a weight that nothing equals."""
        places = np.linspace(0, values.size - 1, min(SAMPLE, values.size)).astype(np.intp)
        sample = values.reshape(-1)[places]
        for name, transposed in candidates:
            weight = self._weight(name, transposed)
            weight_sample = weight.reshape(-1)[places]
            distance = float(np.median(np.abs(sample - weight_sample)))
            if name in self.equal or not distance < SIMILAR * (float(weight_sample.std()) or 1.0):
                continue
            difference = np.abs(values - weight)
            changed = ChangedWeight(
                name,
                f"{array.file}: {array.name}",
                int(np.count_nonzero(difference)),
                int(weight.size),
                float(difference.max()) / (float(weight.std()) or 1.0),
            )
            kept = self.nearest.get(name)
            if kept is None or changed.n_changed < kept.n_changed:
                self.nearest[name] = changed

    def _weight(self, name: str, transposed: bool) -> Array:
        array: Array = weight_of(self.checkpoint, name)
        array = array.reshape(_squeezed(array.shape))
        return np.ascontiguousarray(array.T) if transposed else array

    def _digest(self, name: str, transposed: bool, form: str, power: float = 0.0) -> bytes:
        key = name, transposed, form, power
        if key not in self.digests:
            weight = self._weight(name, transposed)
            if power:
                weight = weight * np.float32(self.head_width**power)
            if form != "float32":  # rounded to float16, and perhaps stored in float32
                weight = weight.astype(np.float16)
            self.digests[key] = _digest(weight.astype(form.removeprefix("rounded to "), copy=False))
        return self.digests[key]

    def _is_half(self, name: str) -> bool:
        if name not in self.halves:
            self.halves[name] = is_half(self.checkpoint, name)
        return self.halves[name]


def _has_levels(groups: Array) -> bool:
    """Return whether the values of each group (n, k) are multiples of 1/127 of its largest one."""
    step = np.abs(groups[:ROWS]).max(axis=1, keepdims=True) / 127
    multiples = groups[:ROWS] / np.where(step == 0, 1, step)
    return bool((np.abs(multiples - np.rint(multiples)) < 0.05).all())


def _groups_are_near(groups: Array, weight: Array) -> bool:
    """Return whether no value (n, k) is farther from a weight's than a step of its group allows."""
    step = np.abs(groups).max(axis=1, keepdims=True) / 127
    near = np.abs(groups - weight) <= HALF_STEP * step + np.finfo(np.float32).tiny
    return bool(near[:QUICK].mean() >= MOST and near.mean() >= MOST)


def _squeezed(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _digest(values: Array) -> bytes:
    return blake2b(np.ascontiguousarray(values).data, digest_size=16).digest()


def _is_near(integers: Array, weight: Array) -> bool:
    """Return whether integers (n, k) times a step, one for each row or column, are within half a step.

    The step is fitted: files name and store it in many ways.
    """
    if weight.ndim < 2:
        return False
    integers, weight = (array.reshape(len(array), -1) for array in (integers, weight))
    return any(
        _rows_are_near(q[:QUICK], w[:QUICK]) and _rows_are_near(q, w)
        for q, w in ((integers, weight), (integers.T, weight.T))
    )


def _rows_are_near(integers: Array, weight: Array) -> bool:
    q = integers - integers.mean(axis=1, keepdims=True)
    w = weight - weight.mean(axis=1, keepdims=True)
    power = (q * q).sum(axis=1)
    step = np.abs((q * w).sum(axis=1) / np.where(power == 0, 1, power))
    if not step.any():
        return False
    step = np.where(step == 0, np.median(step[step > 0]), step)
    near = np.abs(w - step[:, None] * q) <= HALF_STEP * step[:, None]
    return bool((near.mean(axis=1) >= MOST).all())
