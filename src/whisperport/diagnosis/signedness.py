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

NEAR = 0.25  # of a step: the boundary is half a step from the nearest level
NEIGHBOURS = 8  # levels at an end of 16 bits; their mean distance can be missing at that end
MOST_BOUNDARIES = 3  # of 16 bits or of few values, that are tried
FEW_LEVELS = 64  # the values at the middle of the range may be neighbours, and others are missing
CLEAR = 0.15  # of a step: values that are rounded more coarsely do not show the step
FEWEST_LEVELS = 8  # levels that show the step
LARGEST = 1e9  # no output spans as much
FEWEST_STEPS = 100  # steps that the values of an 8-bit output span at least


def other_signedness(reading: Reading) -> Iterator[Reading]:
    """Yield the readings in which one half of the values moves by the whole range; or nothing.

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
    for limit in _boundaries(levels, width):
        yield from _halves(reading, limit, width, step)


def _halves(reading: Reading, limit: float, width: float, step: float) -> Iterator[Reading]:
    """Yield the readings in which the values above a limit, or those below it, move by the whole range."""
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
    with np.errstate(invalid="ignore", over="ignore"):
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


def _boundaries(levels: NDArray[np.float64], width: float) -> tuple[float, ...]:
    """Return where the two halves can meet: near the middle of the range, between two levels.

    The ends of the range may be missing in the file, so that its middle is not known exactly. Of 8 bits,
    the widest gap is the right one, if most levels are in the file. Of 16 bits, the values at the middle
    are the largest and the smallest of the output, with wide gaps around them: only the reference shows on
    which side each of them is.
    """
    lowest, highest = float(levels[0]), float(levels[-1])
    middle = (lowest + highest) / 2
    gaps = np.diff(levels)
    centres = levels[:-1] + gaps / 2
    has_16_bits = levels.size > LEVELS
    if has_16_bits:
        missing = float(max(gaps[:NEIGHBOURS].mean(), gaps[-NEIGHBOURS:].mean()))
    else:
        step = width / LEVELS
        missing = (width - (highest - lowest) - step) / 2 + NEAR * step
    near = (levels[:-1] <= middle + missing) & (levels[1:] >= middle - missing)
    if not near.any():
        return (middle,)
    is_clear = FEW_LEVELS <= levels.size <= LEVELS
    if is_clear:
        near &= gaps > 0.9 * float(gaps[near].max())
    found = centres[near]
    order = np.argsort(np.abs(found - middle))[: 1 if is_clear else MOST_BOUNDARIES]
    return tuple(float(found[i]) for i in order)


def _has_halves(values: Floats) -> bool:
    """Return whether the values deviate less after the upper half moved by the whole range."""
    x = values[np.isfinite(values)].astype(np.float64)
    if x.size < FEWEST_LEVELS or not 0 < (span := float(np.ptp(x))) < LARGEST:
        return False
    moved = np.where(x > x.min() + span / 2, x - span, x)
    return bool(moved.std() < x.std())
