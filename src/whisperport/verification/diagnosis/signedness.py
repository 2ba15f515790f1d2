"""Readings of values that were dequantized from 8-bit integers of the other signedness.

Signed integers that are read as unsigned ones are all right from 0 on, and the negative ones are too high
by 256 steps:

    as stored            -128 … -1 | 0 … 127
    as read                          0 … 127 | 128 … 255

So the values of one half must move by the whole range.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from whisperport.verification.diagnosis.causes import CauseCode, Finding
from whisperport.verification.diagnosis.readings import LEVELS, Reading

BOUNDARIES = 3  # between the halves, that are tried


def with_other_signedness(reading: Reading) -> Iterator[Reading]:
    """Yield a reading; if it has a grid, also those in which one half of the values moves by its range."""
    yield reading
    if reading.are_stored or not reading.step:
        return
    levels = np.unique(reading.values[np.isfinite(reading.values)]).astype(np.float64)
    width = LEVELS * reading.step
    if levels.size < 2 or np.ptp(levels) > width or not _has_halves(reading, levels):
        return
    for limit in _boundaries(levels, width):
        is_high = reading.values > limit
        for half, side, shift in ((is_high, ">", -width), (~is_high, "<=", width)):
            wrong = "unsigned" if shift < 0 else "signed"
            finding = Finding(
                cause=CauseCode.WRONG_SIGNEDNESS,
                sentence=f"The integers were read as {wrong} ones before they were dequantized.",
                advice="Read the file with the dtype of the compiled model's output.",
            )
            yield replace(
                reading,
                values=np.where(half, reading.values + np.float32(shift), reading.values),
                findings=(*reading.findings, finding),
                code=(*reading.code, f"x = np.where(x {side} {limit:.9g}, x + ({shift:.9g}), x)"),
            )


def _has_halves(reading: Reading, levels: NDArray[np.float64]) -> bool:
    """Return whether the values deviate less after the upper half moved by the whole range."""
    x = reading.values[np.isfinite(reading.values)].astype(np.float64)
    middle = (levels[0] + levels[-1]) / 2
    moved = np.where(x > middle, x - LEVELS * reading.step, x)
    return bool(moved.std() < x.std())


def _boundaries(levels: NDArray[np.float64], width: float) -> list[float]:
    """Return where the two halves can meet: in the widest gaps near the middle of the range.

    The ends of the range may be missing in the file, so that its middle is not known exactly.
    """
    gaps, middle = np.diff(levels), (levels[0] + levels[-1]) / 2
    centres = levels[:-1] + gaps / 2
    missing = (width - np.ptp(levels)) / 2
    distance = np.abs(centres - middle)
    near = np.flatnonzero(distance <= missing + gaps / 2)
    widest = sorted(near, key=lambda i: (-np.round(gaps[i] / width, 3), distance[i]))
    return [float(centres[i]) for i in widest[:BOUNDARIES]]
