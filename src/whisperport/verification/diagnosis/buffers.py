"""Values that hold no output: constant ends, parts that belong to another output, and clipped values.

Positions are those of the values in the order of the file, without padding.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whisperport.verification.diagnosis.causes import CauseCode, Finding

Doubles = NDArray[np.float64]
Values = NDArray[np.float32] | NDArray[np.float64]
Mask = NDArray[np.bool_]

SHORTEST = 8  # values; a shorter run of equal values is chance
SHORTEST_SHARE = 1 / 500  # of the file


FEWEST_AT_A_LIMIT = 4  # values; fewer are the extremes of a range that fits
SHARE_AT_A_LIMIT = 2e-4
BEYOND = 0.8  # share of the values at the limits for which the reference is beyond the limit


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A part of a file. False if it is empty."""

    mask: Mask
    start: int = 0
    stop: int = 0
    value: float = 0.0

    def __bool__(self) -> bool:
        return self.stop > self.start


def constant_run(x: Values, there: Mask, *, at_end: bool) -> Region:
    """Return the run of equal values at the beginning or the end of a file; empty if it is short.

    Args:
        x: (n,) values.
        there: (n,) whether the file holds a value.
        at_end: look at the end.
    """
    last = int(np.flatnonzero(there)[-1]) + 1 if there.any() else 0
    used = x[:last]
    mask = np.zeros(x.size, bool)
    if not used.size:
        return Region(mask)
    edge = used[-1] if at_end else used[0]
    differing = np.flatnonzero(used != edge)
    if not differing.size:
        return Region(mask)
    start, stop = (int(differing[-1]) + 1, used.size) if at_end else (0, int(differing[0]))
    if stop - start < max(SHORTEST, SHORTEST_SHARE * used.size):
        return Region(mask)
    mask[start:stop] = True
    return Region(mask, start, stop, float(edge))


def split_between(own: Doubles, stale: Doubles) -> tuple[float, int, bool] | None:
    """Return how to divide a file between two outputs so that the error is smallest.

    Args:
        own: square error of each block if it holds the expected output.
        stale: the same if it holds another output.

    Returns:
        The smallest error in parts of that of the expected output alone, the first block of the second
        part, and whether the second part holds the other output; None if no division is better.
    """
    zero = np.zeros(1)
    mine, stale_sums = (np.concatenate([zero, np.cumsum(np.nan_to_num(e))]) for e in (own, stale))
    ends = mine + stale_sums[-1] - stale_sums  # the other output is at the end
    starts = stale_sums + mine[-1] - mine
    at_end = bool(ends.min() <= starts.min())
    errors = ends if at_end else starts
    split = int(errors.argmin())
    if split in (0, own.size) or not mine[-1] > 0:
        return None
    return float(errors[split] / mine[-1]), split, at_end


def region_between(
    own: Doubles, stale: Doubles, starts: NDArray[np.int64], split: int, *, at_end: bool
) -> Region:
    """Return the part of a file that holds the other output, to the value.

    Args:
        own: (n,) square errors if the file holds the expected output.
        stale: the same for the other output.
        starts: first value of each block.
        split: first block of the second part.
        at_end: whether the second part holds the other output.
    """
    edges = np.concatenate([starts, [own.size]])
    low, high = int(edges[max(0, split - 1)]), int(edges[min(edges.size - 1, split + 1)])
    gain = np.concatenate([[0.0], np.cumsum((stale - own)[low:high])])
    boundary = low + int(gain.argmax() if at_end else gain.argmin())
    mask = np.zeros(own.size, bool)
    start, stop = (boundary, own.size) if at_end else (0, boundary)
    mask[start:stop] = True
    return Region(mask, start, stop)


def tail_finding(tail: Region, count: int) -> Finding:
    """Return the cause of constant values at the end."""
    return Finding(
        cause=CauseCode.ZERO_TAIL,
        sentence=f"The values from number {tail.start:,} of {count:,} on are {tail.value:.6g}: they were "
        "not written.",
        advice="Wait until the device has finished, and copy the complete buffer.",
    )


def stale_finding(stale: Region, count: int, held: str) -> Finding:
    """Return the cause of a part that holds something else.

    Args:
        stale: the part.
        count: number of values of the output.
        held: what the part holds; empty: one constant.
    """
    part = (
        f"before number {stale.stop:,}" if stale.start == 0 else f"from number {stale.start:,} on"
    )
    return Finding(
        cause=CauseCode.STALE_BUFFER,
        sentence=f"The values {part}, of {count:,}, belong to {held or 'no output: they are constant'}.",
        advice="Wait until the device has finished, and clear the buffer before each run.",
    )


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """The largest and the smallest value of a file, where many values are equal to it.

    Attributes:
        low: the smallest value; −infinity if few values are equal to it.
        high: the largest value; infinity if few values are equal to it.
        mask: (n,) the values at a limit.
    """

    low: float
    high: float
    mask: Mask


def limits_of(x: Doubles, ok: Mask) -> Limits:
    """Return the limits at which many values lie.

    Args:
        x: (n,) values in the order of the file.
        ok: (n,) whether a value counts.
    """
    nothing = np.zeros(x.size, bool)
    count = int(np.count_nonzero(ok))
    low, high = float(x.min(where=ok, initial=np.inf)), float(x.max(where=ok, initial=-np.inf))
    at_low, at_high = ok & (x == low), ok & (x == high)
    fewest = max(FEWEST_AT_A_LIMIT, SHARE_AT_A_LIMIT * count)
    if np.count_nonzero(at_low) < fewest:
        low, at_low = -np.inf, nothing
    if np.count_nonzero(at_high) < fewest:
        high, at_high = np.inf, nothing
    mask = at_low | at_high
    if np.count_nonzero(mask) > 0.9 * count:
        return Limits(-np.inf, np.inf, nothing)
    return Limits(low, high, mask)


def saturation_finding(limits: Limits, predicted: Doubles, used: Mask) -> Finding | None:
    """Return the cause if the reference is beyond the limits where the file is at them; None otherwise.

    Args:
        limits: the limits of the file's values.
        predicted: (n,) values that the reference implies, without limits.
        used: (n,) whether a value counts.
    """
    at_limit = limits.mask & used
    count = int(np.count_nonzero(at_limit))
    if not count:
        return None
    values = predicted[at_limit]
    clipped = np.clip(values, limits.low, limits.high)
    # Without saturation, the largest value is the reference's own: the excess is rounding only.
    excess = float(np.mean(np.square(values - clipped)))
    spread = float(np.std(predicted[used]))
    beyond = np.count_nonzero((values > limits.high) | (values < limits.low))
    if beyond < BEYOND * count or excess < (0.01 * spread) ** 2:
        return None
    shown = [f"{limit:.6g}" for limit in (limits.low, limits.high) if np.isfinite(limit)]
    return Finding(
        cause=CauseCode.SATURATED,
        sentence=f"{count:,} of {np.count_nonzero(used):,} values are clipped to {' or '.join(shown)}.",
        advice="Calibrate the quantization with louder and more varied audio, or use 16-bit activations.",
    )
