"""Fit one hypothesis (a reading, a layout and a reference): the order and the line that let both agree.

In the order of the file, without padding, the hypothesis is

    x = clip(a · r[frames, channels] + b)

with a frame map, a channel map, a line and limits. Each part is found from the values, and counts as a
cause only if it lowers the error enough.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whisperport.diagnosis import channels
from whisperport.diagnosis.buffers import Region
from whisperport.diagnosis.causes import CauseCode
from whisperport.diagnosis.explanation import ROUNDING_FACTOR
from whisperport.diagnosis.file_values import FileValues
from whisperport.diagnosis.geometries import Geometry, geometries, in_order
from whisperport.diagnosis.readings import Reading
from whisperport.diagnosis.reference_outputs import ReferenceOutput
from whisperport.diagnosis.result import Finding
from whisperport.diagnosis.scales import (
    PER_CAUSE_DB,
    SMALLEST,
    BlockSums,
    Line,
    ScaleFit,
    block_starts,
    fits,
    swapped_fit,
)

Doubles = NDArray[np.float64]
Mask = NDArray[np.bool_]

MOST_ROUNDING = 0.01  # of the mean square (20 dB): more is no storage of an output
AGREEING = 3e-3  # error of a block that agrees, in parts of the mean square (25 dB)
FEWEST_BLOCKS = 8  # of 256, that agree with one order of frames and channels and not with another
CAUSE = 10 ** (-PER_CAUSE_DB / 10)  # the part of an error that a further cause may leave


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
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

    @property
    def in_agreement(self) -> Mask:
        """The values of the blocks that agree with the reference; all if only a few do."""
        starts = block_starts(self.r.size)
        agrees = self.fit.blocks < AGREEING
        if np.count_nonzero(agrees) < FEWEST_BLOCKS:
            return np.ones(self.r.size, bool)
        return np.repeat(agrees, np.diff(starts, append=self.r.size))


def best_fits(data: FileValues) -> list[Fitted]:
    """Return the cheapest geometry with its line; the search ends when the rest is rounding.

    If another geometry makes a larger part of the file agree exactly, it is returned, too: the rest of the
    file may hold something else. So is the one that explains most with one factor per channel.
    """
    best = most = by_factors = _fit(data, Geometry())
    if best is not None and _is_done(best):
        return [best]
    rest = _rest_of_factors(data, best)
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
        rest_here = _rest_of_factors(data, fitted)
        if rest_here < CAUSE * rest:
            by_factors, rest = fitted, rest_here
    return [one for one in dict.fromkeys((best, most, by_factors)) if one]


def _rest_of_factors(data: FileValues, fitted: Fitted | None) -> float:
    """Return the part of the file's square that one factor per channel leaves unexplained."""
    if fitted is None or data.hypothesis.reading.are_stored:
        return 1.0
    x = data.in_frames(np.where(data.usable & fitted.held, data.x, 0.0))
    r = data.in_frames(np.where(data.usable & fitted.held, fitted.r, 0.0))
    return channels.rest_of_factors(x, r)


def _is_done(fitted: Fitted) -> bool:
    return not fitted.has_run and fitted.fit.error <= max(ROUNDING_FACTOR * fitted.floor, SMALLEST)


def _fit(data: FileValues, geometry: Geometry) -> Fitted | None:
    """Fit the line of a geometry."""
    r, held = in_order(data, geometry)
    usable = data.usable & held
    if np.count_nonzero(usable) < 8:
        return None
    reading = data.hypothesis.reading
    sums = BlockSums(data.x, r, usable)
    if not sums.mean_square > 0:
        return None
    if reading.are_stored:
        both = sums.fit(scale=True, offset=True)
        candidates = [ScaleFit(both.line, 0, both.blocks, both.error)] if both else []
    else:
        candidates = fits(sums)
        if swapped := swapped_fit(sums, reading):
            candidates.append(swapped)
    there = data.exists & held
    has_run = any(is_constant(run, there) for run in (data.tail, data.head) if run)
    best: Fitted | None = None
    for fit in candidates:
        floor = rounding_of(reading, fit.line, sums.mean_square)
        moved = len(moved_causes(data.hypothesis.reference, geometry, fit.error, floor))
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
    reference: ReferenceOutput, geometry: Geometry, error: float, floor: float
) -> tuple[Finding, ...]:
    """Return the causes of a geometry.

    Of other windows, only some are known: a shift to the nearest one is no cause of its own, unless the
    file holds exactly its frames.
    """
    if reference.is_window and error > max(ROUNDING_FACTOR * floor, SMALLEST):
        return tuple(f for f in geometry.findings if f.cause is not CauseCode.FRAME_SHIFT)
    return geometry.findings


def is_constant(region: Region, there: Mask) -> bool:
    return bool(np.count_nonzero(region.mask & there) >= 8)
