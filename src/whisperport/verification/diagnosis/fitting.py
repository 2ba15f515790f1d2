"""Fit a candidate to an output: the order and the line that let both agree.

In the order of the file, without padding, the hypothesis is

    x = clip(a · r[frames, channels] + b)

with a frame map, a channel map, a line and limits. Each part is found from the values, and counts as a
cause only if it lowers the error enough.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whisperport.verification.diagnosis.buffers import Region
from whisperport.verification.diagnosis.candidates import FileValues
from whisperport.verification.diagnosis.causes import CauseCode, Finding
from whisperport.verification.diagnosis.geometries import Geometry, geometries, in_order
from whisperport.verification.diagnosis.readings import Reading
from whisperport.verification.diagnosis.scales import (
    PER_CAUSE_DB,
    SMALLEST,
    BlockSums,
    Line,
    ScaleFit,
    fits,
)

Doubles = NDArray[np.float64]
Mask = NDArray[np.bool_]

ROUNDING_FACTOR = 3.0  # an error up to this multiple of the rounding's mean square is rounding
MOST_ROUNDING = 0.01  # of the mean square (20 dB): more is no storage of an output
AGREEING = 3e-3  # error of a block that agrees, in parts of the mean square (25 dB)
FEWEST_BLOCKS = 8  # of 256, that agree with one order of frames and channels and not with another


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """A geometry with its line."""

    geometry: Geometry
    r: Doubles  # (n,) the reference in the order of the file; 0 where the file holds none
    held: Mask  # (n,) whether a value of the file belongs to the reference
    fit: ScaleFit
    floor: float
    cost_db: float
    has_run: bool  # whether constant values at an end count as a cause

    @property
    def agreeing(self) -> int:
        """Number of blocks of the file that agree with the reference."""
        return int(np.count_nonzero(self.fit.blocks < AGREEING))


def best_fits(data: FileValues) -> list[Fitted]:
    """Return the cheapest geometry with its line; the search ends when the rest is rounding.

    If another geometry makes a larger part of the file agree exactly, it is returned, too: the rest of the
    file may hold something else.
    """
    best = most = _fit(data, Geometry())
    if best is not None and _is_done(best):
        return [best]
    for geometry in geometries(data):
        fitted = _fit(data, geometry)
        if fitted is None:
            continue
        if best is None or fitted.cost_db < best.cost_db - 1e-9:
            best = fitted
            if _is_done(best):
                return [best]
        if most is None or fitted.agreeing > most.agreeing + FEWEST_BLOCKS:
            most = fitted
    return [fit for fit in dict.fromkeys((best, most)) if fit]


def _is_done(fitted: Fitted) -> bool:
    return not fitted.has_run and fitted.fit.error <= max(ROUNDING_FACTOR * fitted.floor, SMALLEST)


def _fit(data: FileValues, geometry: Geometry) -> Fitted | None:
    """Fit the line of a geometry."""
    r, held = in_order(data, geometry)
    usable = data.usable & held
    if np.count_nonzero(usable) < 8:
        return None
    reading = data.candidate.reading
    sums = BlockSums(data.x, r, usable)
    if not sums.mean_square > 0:
        return None
    if reading.are_stored:
        affine = sums.fit(scale=True, offset=True)
        lines = [ScaleFit(affine.line, 0, affine.blocks, affine.error)] if affine else []
    else:
        lines = fits(sums)
    there = data.exists & held
    has_run = any(is_constant(run, there) for run in (data.tail, data.head) if run)
    best: Fitted | None = None
    for fit in lines:
        floor = rounding_of(reading, fit.line, sums.mean_square)
        moved = len(moved_causes(data, geometry, fit.error, floor))
        cost = fit.cost_db(max(floor, SMALLEST)) + PER_CAUSE_DB * (moved + has_run)
        if best is None or cost < best.cost_db:
            best = Fitted(geometry, r, held, fit, floor, cost, has_run)
    return best


def rounding_of(reading: Reading, line: Line, mean_square: float) -> float:
    """Return the rounding error in parts of the reference's mean square.

    A rounding as large as the values themselves explains any error, so it is not counted completely.
    """
    return min(reading.rounding / (line.a**2 * mean_square), MOST_ROUNDING)


def moved_causes(
    data: FileValues, geometry: Geometry, error: float, floor: float
) -> tuple[Finding, ...]:
    """Return the causes of a geometry.

    Of other windows, only some are known: a shift to the nearest one is no cause of its own, unless the
    file holds exactly its frames.
    """
    if data.reference.is_window and error > max(ROUNDING_FACTOR * floor, SMALLEST):
        return tuple(f for f in geometry.findings if f.cause is not CauseCode.FRAME_SHIFT)
    return geometry.findings


def is_constant(region: Region, there: Mask) -> bool:
    """Return whether a constant run holds values that count."""
    return bool(np.count_nonzero(region.mask & there) >= 8)
