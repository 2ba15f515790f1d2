"""Match the values of two programs: by names, modules and operators, by their order, and by similarity.

    A   v1 ── v2 ── v3 ─────── v4          a pair has a score: equal names, modules, operators and shapes,
         │     │     │          │          and how similar the values are, whatever the order of their axes
    B   w1 ── w2 ── w3 ── w4 ── w5          the pairs whose scores have the largest sum, in one order

A value of which no sum, mean or largest value is alike may still be matched, by its name or module: it is
what diverges.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod

import numpy as np
from numpy.typing import NDArray

from whisperport.program.runner import Array

Doubles = NDArray[np.float64]

MIN_SCORE = 0.8  # of a pair: the same operator and shape, between pairs that are surer
# Largest difference of two values' statistics, relative to their size -> score of their similarity.
ALIKE = ((1e-4, 4.0), (1e-2, 3.0), (0.1, 1.5))
SAME = 1e-4  # relative error of one value in two runtimes, at most
NAME, MODULE, OPERATOR, SHAPE = 3.0, 1.2, 0.6, 0.2
MASKED = 1e30  # and more: from a mask, as torch writes it, -3.4e38
MAX_PERMUTED_RANK = 5  # 120 orders of axes


@dataclass(frozen=True, slots=True, eq=False)
class NamedValue:
    """One value of a program, with what it can be recognized by."""

    name: str
    array: Array
    operator: str = ""
    module: str = ""


def matched(a: Sequence[NamedValue], b: Sequence[NamedValue]) -> list[tuple[int, int]]:
    """Return pairs of places in `a` and `b`, sorted by the place in `a`.

    Values that the two programs compute in another order are matched afterwards, if they are alike or have
    one name.
    """
    if not a or not b:
        return []
    scores = _scores(a, b)
    pairs = _in_order(scores)
    used = [{pair[side] for pair in pairs} for side in (0, 1)]
    sure = np.where(scores >= NAME, scores, 0)
    sure[list(used[0])] = 0
    sure[:, list(used[1])] = 0
    while sure.max() > 0:
        i, j = map(int, np.unravel_index(np.argmax(sure), sure.shape))
        pairs.append((i, j))
        sure[i] = 0
        sure[:, j] = 0
    return sorted(pairs)


def reproduced(a: Sequence[NamedValue], b: Sequence[NamedValue]) -> Iterator[int]:
    """Yield the places in `a` of the values that are in `b` too, whatever the order of their axes."""
    distance = _distances(_statistics(a), _statistics(b))
    for place, value in enumerate(a):
        for place_in_b in np.flatnonzero(distance[place] < ALIKE[0][0]):
            fitted = aligned(value.array, b[int(place_in_b)].array, layouts=True)
            if fitted is not None and error_of(value.array, fitted) < SAME:
                yield place
                break


def _scores(a: Sequence[NamedValue], b: Sequence[NamedValue]) -> Doubles:
    """Return the score of every pair, (values of a, values of b); 0 for a pair that cannot be matched."""
    distance = _distances(_statistics(a), _statistics(b))
    shapes = [[tuple(n for n in value.array.shape if n != 1) for value in side] for side in (a, b)]
    told = NAME * _equal([value.name for value in a], [value.name for value in b])
    told += MODULE * _equal([value.module for value in a], [value.module for value in b])
    told += OPERATOR * _equal([value.operator for value in a], [value.operator for value in b])
    similar = np.zeros(distance.shape)
    for largest, score in reversed(ALIKE):
        similar[distance < largest] = score
    similar[(similar == ALIKE[-1][1]) & (told == 0)] = (
        0  # roughly alike: as an operator's own parts are
    )
    scores = similar + told + SHAPE * _equal(*shapes)
    sizes = _equal([value.array.size for value in a], [value.array.size for value in b])
    permuted = _equal(*[[tuple(sorted(shape)) for shape in side] for side in shapes])
    # Values of one size whose axes differ are a reshaped form only if their values are alike.
    return np.where(
        sizes & (permuted | (distance < ALIKE[0][0])) & (scores >= MIN_SCORE), scores, 0
    )


def _equal(a: Sequence[object], b: Sequence[object]) -> NDArray[np.bool_]:
    """Return which members of `a` equal which of `b`; an empty one equals none."""
    numbers: dict[object, int] = {}
    x, y = (
        np.array(
            [
                numbers.setdefault(member, len(numbers)) if member != "" else -1 - place
                for member in side
            ]
        )
        for place, side in enumerate((a, b))
    )
    equal: NDArray[np.bool_] = x[:, None] == y[None, :]
    return equal


@np.errstate(over="ignore", invalid="ignore")
def _statistics(values: Sequence[NamedValue]) -> Doubles:
    """Return of each value what no order of its axes changes, (values, 6)."""
    rows = []
    for value in values:
        x = value.array.ravel().astype(np.float32)
        x = np.where(np.abs(x) < MASKED, x, np.float32(0))
        size = max(float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))), 1e-30)
        x = x / np.float32(size)
        rows.append(
            (np.log(size), x.mean(), np.abs(x).mean(), (x**3).mean(), x.max() / 8, x.min() / 8)
        )
    return np.nan_to_num(np.array(rows, np.float64))


def _distances(a: Doubles, b: Doubles) -> Doubles:
    distance = np.zeros((len(a), len(b)))
    for column in range(a.shape[1]):
        np.maximum(distance, np.abs(a[:, None, column] - b[None, :, column]), out=distance)
    return distance


def _in_order(scores: Doubles) -> list[tuple[int, int]]:
    """Return the pairs of the largest sum of scores that have one order in both programs."""
    best = np.zeros((scores.shape[0] + 1, scores.shape[1] + 1))
    for i, row in enumerate(scores):
        paired = np.where(row > 0, best[i, :-1] + row, 0)
        best[i + 1, 1:] = np.maximum.accumulate(np.maximum(best[i, 1:], paired))
    pairs = []
    i, j = scores.shape
    while i and j:
        if best[i, j] == best[i - 1, j]:
            i -= 1
        elif best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((i, j))
    return pairs[::-1]


def aligned(a: Array, b: Array, *, layouts: bool) -> Array | None:
    """Return `b` in the shape of `a`; None if no order of its axes fits.

    Args:
        layouts: whether the programs may store a value of one shape in another order of axes.
    """
    if a.shape == b.shape and not layouts:
        return b
    candidates = list(arrangements(a.shape, b))
    errors = [error_of(a, candidate) for candidate in candidates]
    return candidates[int(np.argmin(errors))] if candidates else None


def arrangements(shape: tuple[int, ...], b: Array) -> Iterator[Array]:
    """Yield `b` in every order of its axes that has a shape; axes of length 1 do not count."""
    if prod(shape) != b.size:
        return
    yield b.reshape(shape)
    lengths, squeezed = tuple(n for n in shape if n != 1), b.squeeze()
    if sorted(lengths) == sorted(squeezed.shape) and squeezed.ndim <= MAX_PERMUTED_RANK:
        for order in permutations(range(squeezed.ndim)):
            if tuple(squeezed.shape[axis] for axis in order) == lengths:
                yield squeezed.transpose(order).reshape(shape)


@np.errstate(over="ignore", invalid="ignore")
def error_of(a: Array, b: Array) -> float:
    """Return the relative error, ‖b − a‖ / ‖a‖; infinity if other values are NaN or infinite.

    What masks add, infinities or numbers near the largest one, is equal if it is in the same places.
    """
    x, y = a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)
    usual = np.abs(x) < MASKED
    if not usual.all() or not (np.abs(y) < MASKED).all():
        if np.isnan(x).any() or np.isnan(y).any():
            return np.inf
        if not np.array_equal(usual, np.abs(y) < MASKED) or (x[~usual] * y[~usual] < 0).any():
            return np.inf
        x, y = x[usual], y[usual]
    noise = float(np.sum(np.square(y - x, dtype=np.float64)))
    signal = float(np.sum(np.square(x, dtype=np.float64)))
    if noise == 0:
        return 0.0
    return float(np.sqrt(noise / signal)) if signal else np.inf
