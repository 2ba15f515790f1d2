"""Whether values are those of a weight, rounded to integers of 8 bits.

Files store the integers with their step, without it, or already multiplied by it; a step belongs to a row,
a column or, in ggml, a block of a row.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whisperport.verification.diagnosis.differences import LEAST_NEAR, TINY

Array = NDArray[Any]
HALF_STEP = 0.75  # of a step of 8 bits: half, and what the fit of the step costs (0.64 seen)
OUTLIER = 16  # steps of 8 bits: rounding moves no value so far, and clipping only towards 0
LEAST_OF_LINE = 0.75  # of a row's or column's values: below it, its own step is another one
BLOCK = 32  # values of ggml's blocks, which have a step of their own
ROWS = 64  # of an array, by which its levels are found
QUICK = 4  # rows and columns, by which most other weights of the same shape are ruled out
END = 0.95  # of the largest or smallest value of a step, to which others are clipped
EVEN = 1e-4  # of the largest value of a row: values nearer to each other are one
SIGN = 128  # integers of 8 bits on each side of 0
LARGEST = 127, 128  # which the largest of a group may be; the second is one side's only
LEAST_STEP = 127 * 2.0**-25  # what 127 steps lose where a step in float16 is as small as can be


def is_near_steps(values: Array, weight: Array, step: Array) -> bool:
    """Return whether hardly a value is farther from a weight's than its step allows."""
    distance = np.abs(values - weight)
    near = distance <= HALF_STEP * step
    return bool(
        near.mean() >= LEAST_NEAR
        and all(near.mean(axis=i).min() >= LEAST_OF_LINE for i in range(near.ndim))
        and not _has_outlier(distance, values, weight, step)
    )


def groups_of(values: Array) -> Iterator[Array]:
    """Yield the groups (n, k) of values that may be integers of 8 bits, multiplied by the group's step."""
    for size in {values[0].size, BLOCK} if values.ndim > 1 else ():
        if values.size % size == 0:
            groups = values.astype(np.float32).reshape(-1, size)
            if _largest(groups):
                yield groups


def groups_are_near(groups: Array, weight: Array) -> bool:
    """Return whether hardly a value (n, k) is farther from a weight's than a step of its group allows."""
    step = steps_of(groups)
    distance = np.abs(groups - weight)
    near = distance <= HALF_STEP * step + LEAST_STEP
    if near[:QUICK].mean() < LEAST_NEAR or near.mean() < LEAST_NEAR:
        return False
    is_near = bool(near.mean(axis=1).min() >= LEAST_OF_LINE)
    return is_near and not _has_outlier(distance, groups, weight, step)


def steps_of(groups: Array) -> Array:
    """Return the step (n, 1) of each group (n, k) whose largest value is 127 of 8 bits, or 128."""
    steps: Array = np.abs(groups).max(axis=1, keepdims=True) / (_largest(groups) or LARGEST[0])
    return steps


def gaps_of(values: Array) -> Array | None:
    """Return the step (n, 1) of rows (n, k) that are integers of 8 bits times it; None: they are not."""
    if values.ndim != 2 or len(values[0]) < ROWS or not np.isfinite(values).all():
        return None
    rises = np.diff(np.sort(values, axis=1), axis=1)
    smallest = EVEN * np.abs(values).max(axis=1, keepdims=True)
    gaps: Array = np.where(rises > smallest, rises, np.inf).min(axis=1, keepdims=True)
    gaps = np.where(np.isfinite(gaps), gaps, 1)
    multiples = values / gaps
    is_whole = np.abs(multiples - np.rint(multiples)) < 0.05
    return gaps if is_whole.all() and np.abs(multiples).max() < 2 * SIGN else None


def is_near_integers(integers: Array, weight: Array) -> bool:
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


def _largest(groups: Array) -> int:
    """Return how many steps the largest value of each group (n, k) has; 0: it has no steps."""
    sample = groups[:ROWS]
    ends = np.abs(sample).max(axis=1, keepdims=True)
    if not np.isfinite(ends).all():
        return 0
    for largest in LARGEST:
        multiples = sample / np.where(ends == 0, 1, ends / largest)
        if (np.abs(multiples - np.rint(multiples)) < 0.05).all():
            return largest
    return 0


def _has_outlier(distance: Array, values: Array, weight: Array, step: Array) -> bool:
    """Return whether a value is so far from a weight's that neither rounding nor clipping explains it."""
    is_far = distance > OUTLIER * np.abs(step) + TINY
    if not is_far.any():
        return False
    axes = tuple(axis for axis, size in enumerate(step.shape) if size == 1) or None
    ends = values.min(axis=axes, keepdims=True), values.max(axis=axes, keepdims=True)
    is_end = (values <= END * ends[0]) | (values >= END * ends[1])
    is_clipped = is_end & (values * weight >= 0) & (np.abs(values) < np.abs(weight))
    return bool((is_far & ~is_clipped).any())


def _rows_are_near(integers: Array, weight: Array) -> bool:
    q = integers - integers.mean(axis=1, keepdims=True)
    w = weight - weight.mean(axis=1, keepdims=True)
    power = (q * q).sum(axis=1)
    step = np.abs((q * w).sum(axis=1) / np.where(power == 0, 1, power))
    if not step.any():
        return False
    step = np.where(step == 0, np.median(step[step > 0]), step)
    near = np.abs(w - step[:, None] * q) <= HALF_STEP * step[:, None]
    return bool((near.mean(axis=1) >= LEAST_NEAR).all())
