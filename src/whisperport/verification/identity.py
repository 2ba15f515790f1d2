"""Find whether an output is that of something else: of another clip, an earlier frame, or another layout.

An SQNR of 13 dB can be a correct program of 8 bits, or an exact one that is a frame late. So an output must
not be clearly closer to a wrong expectation than to its own. Massive activations, single channels hundreds
of times larger than all others, would decide such a comparison alone; each channel is clipped first.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHIFTS = (-8, -4, -3, -2, -1, 1, 2, 3, 4, 8)  # rows that an output may be early or late
CLEARLY = 0.8  # a wrong expectation is clearly closer at this part of the distance to the right one
WIDEST = 6.0  # a channel is clipped at this multiple of its median distance to its median

Rows = NDArray[np.float64]


def mistaken_for(
    actual: NDArray[Any], expected: NDArray[Any], others: Mapping[str, NDArray[Any]], rows: int
) -> str:
    """Return what an output is instead of the expected one, as a reason; empty if it is the expected one.

    Args:
        actual: (T, d) output, finite and of the shape of `expected`.
        expected: (T, d) reference.
        others: what else it might be -> (at least `rows`, d), such as another clip's reference.
        rows: number of first rows that are compared, such as the frames of speech.
    """
    center = np.median(expected, axis=0).astype(np.float64)
    spread = np.median(np.abs(expected - center), axis=0) + 1e-30
    found = _clipped(actual[:rows], center, spread)
    own = _distance(found, _clipped(expected[:rows], center, spread))
    for what, other in _mistakes(expected, others, rows):
        if _distance(found, _clipped(other, center, spread)) < CLEARLY * own:
            return f"it is closer to {what} than to its reference"
    return ""


def _mistakes(
    expected: NDArray[Any], others: Mapping[str, NDArray[Any]], rows: int
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield wrong expectations of at least `rows` rows, each with its name."""
    for what, other in others.items():
        if len(other) >= rows:
            yield what, other[:rows]
    for shift in SHIFTS:
        if abs(shift) < rows:
            late = np.roll(expected, shift, axis=0)
            yield f"its reference {abs(shift)} rows {'late' if shift > 0 else 'early'}", late[:rows]
    yield "its reference read transposed", _transposed(expected)[:rows]
    if len(expected) > rows + 1:
        rest = np.median(expected[rows:], axis=0)
        yield "what follows the speech", np.broadcast_to(rest, expected[:rows].shape)


def _transposed(array: NDArray[Any]) -> NDArray[Any]:
    """Return (T, d) as a reader of (d, T) would understand its values."""
    return array.T.reshape(array.shape)


def _clipped(array: NDArray[Any], center: Rows, spread: Rows) -> Rows:
    found: Rows = np.clip((array - center) / spread, -WIDEST, WIDEST)
    return found


def _distance(a: Rows, b: Rows) -> float:
    """Return the median over rows of the squared distance, so that a few wild rows do not decide."""
    return float(np.median(np.sum((a - b) ** 2, axis=1)))
