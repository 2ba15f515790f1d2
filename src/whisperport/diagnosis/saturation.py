"""Saturation: values that are clipped to the limits of a quantization's range."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whisperport.diagnosis.causes import CauseCode
from whisperport.diagnosis.result import Finding

Doubles = NDArray[np.float64]
Mask = NDArray[np.bool_]

FEWEST = 4  # values at a limit; fewer are the extremes of a range that fits
FEWEST_SHARE = 2e-4
BEYOND = 0.8  # share of the values at the limits for which the reference is beyond the limit


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
    mask = np.zeros(x.size, bool)
    low, high = -np.inf, np.inf
    count = int(np.count_nonzero(ok))
    if count < 2 * FEWEST:
        return Limits(low, high, mask)
    fewest = max(FEWEST, FEWEST_SHARE * count)
    smallest = float(np.min(x, where=ok, initial=np.inf))
    largest = float(np.max(x, where=ok, initial=-np.inf))
    if smallest == largest:
        return Limits(low, high, mask)
    at_low, at_high = ok & (x == smallest), ok & (x == largest)
    if np.count_nonzero(at_low) >= fewest:
        low, mask = smallest, mask | at_low
    if np.count_nonzero(at_high) >= fewest:
        high, mask = largest, mask | at_high
    if np.count_nonzero(mask) > 0.9 * count:
        return Limits(-np.inf, np.inf, np.zeros(x.size, bool))
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
