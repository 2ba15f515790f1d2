"""Readings of values that were dequantized from integers of the other signedness.

Signed integers that are read as unsigned ones are all right from 0 on, and the negative ones are too high
by 2^bits steps:

    as stored            -128 … -1 | 0 … 127
    as read                          0 … 127 | 128 … 255

So the values of one half must move by the whole range. The two ends of the range as it was read are
neighbours in the right one, where most values are: the range's width follows from the values.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from whisperport.diagnosis.causes import CauseCode
from whisperport.diagnosis.readings import LEVELS, RELATIVE_STEP, Floats, Reading
from whisperport.diagnosis.result import Finding

MISSING = 0.004  # part of a range whose ends are in the file: one step of 8 bits
CLEAR = 0.15  # of a step: values that are rounded more coarsely do not show the step
FEWEST_LEVELS = 8  # levels that show the step
LARGEST = 1e9  # no output spans as much
FEWEST_STEPS = 100  # steps that the values of an 8-bit output span at least


def other_signedness(reading: Reading) -> Iterator[Reading]:
    """Yield the two readings in which one half of the values moves by the whole range; or nothing.

    Args:
        reading: the file as floats.
    """
    if reading.are_stored or not _has_halves(reading.values):
        return
    levels = np.unique(reading.values[np.isfinite(reading.values)]).astype(np.float64)
    if levels.size < FEWEST_LEVELS:
        return
    span = float(levels[-1] - levels[0])
    width, step = _width(levels, span, reading)
    if not width > 0:
        return
    limit = _boundary(levels, width)
    is_high = reading.values > limit
    for half, wrong, shift in ((is_high, "unsigned", -width), (~is_high, "signed", width)):
        finding = Finding(
            cause=CauseCode.WRONG_SIGNEDNESS,
            sentence=f"The integers were read as {wrong} ones before they were dequantized.",
            advice="Read the file with the dtype of the compiled model's output.",
        )
        side = ">" if wrong == "unsigned" else "<="
        yield replace(
            reading,
            values=_shifted(reading.values, half, shift),
            findings=(*reading.findings, finding),
            code=(*reading.code, f"x = np.where(x {side} {limit:.9g}, x + ({shift:.9g}), x)"),
            rounding=max(reading.rounding, step**2 / 12),
            moved=None if reading.step else half,
        )


def moved_further(reading: Reading, distance: float) -> Reading:
    """Return a reading of `other_signedness` whose half has moved further, and by a certain distance."""
    if reading.moved is None:
        return reading
    before, shift = reading.code[-1][: -len(", x)")].rsplit("x + (", 1)
    code = f"{before}x + ({float(shift.rstrip(')')) + distance:.9g}), x)"
    values = _shifted(reading.values, reading.moved, distance)
    return replace(reading, values=values, code=(*reading.code[:-1], code), moved=None)


def _shifted(values: Floats, half: NDArray[np.bool_], distance: float) -> Floats:
    shifted = values.copy()
    shifted[half] += np.float32(distance)
    return shifted


def _width(levels: NDArray[np.float64], span: float, reading: Reading) -> tuple[float, float]:
    """Return the width of the range and its step; 0 if no range of 8 or 16 bits fits the values."""
    if levels.size > LEVELS:
        steps = 2**16 - 1  # neighbours are almost always in the file
        return span * (steps + 1) / steps, span / steps
    step = reading.step or _rounded_step(levels, span, RELATIVE_STEP.get(reading.dtype, 0.0))
    return (LEVELS * step, step) if span < (LEVELS - 0.5) * step else (0.0, 0.0)


def _rounded_step(levels: NDArray[np.float64], span: float, relative: float) -> float:
    """Return the step of levels that were rounded to a short float; 0 if there is none.

    Small values show the step: they are its multiples, and their rounding is much smaller than it.
    """
    best, smallest = 0.0, 0.25
    if not relative:
        return best
    for count in range(LEVELS - 1, FEWEST_STEPS, -1):
        step = span / count
        small = levels[relative * np.abs(levels) < CLEAR * step]
        if small.size < FEWEST_LEVELS:
            continue
        parts = small / step
        error = float(np.sqrt(np.mean(np.square(parts - np.rint(parts)))))
        if error < 0.8 * smallest:
            best, smallest = step, error
    return best


def _boundary(levels: NDArray[np.float64], width: float) -> float:
    """Return where the two halves meet: the middle of the range, whose ends may be missing in the file."""
    lowest, highest = float(levels[0]), float(levels[-1])
    middle = (lowest + highest) / 2
    missing = max(width - (highest - lowest) - width / LEVELS, MISSING * width) / 2
    gaps = np.diff(levels)
    centres = levels[:-1] + gaps / 2
    near = np.abs(centres - middle) <= missing
    if not near.any():
        return middle
    wide = near & (gaps > 0.9 * float(gaps[near].max()))
    return float(centres[wide][np.abs(centres[wide] - middle).argmin()])


def _has_halves(values: Floats) -> bool:
    """Return whether the values deviate less after the upper half moved by the whole range."""
    x = values[np.isfinite(values)].astype(np.float64)
    if x.size < FEWEST_LEVELS or not 0 < (span := float(np.ptp(x))) < LARGEST:
        return False
    moved = np.where(x > x.min() + span / 2, x - span, x)
    return bool(moved.std() < x.std())
