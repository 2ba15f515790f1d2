"""How similar a reading of a file is to an output, whatever the scale, the offset or a shift.

Compared are the values of some frames, the means of the channels, and the deviations of the frames.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from whisperport.verification.diagnosis.buffers import constant_run
from whisperport.verification.diagnosis.candidates import Candidate
from whisperport.verification.diagnosis.readings import Floats
from whisperport.verification.diagnosis.reference_outputs import ReferenceOutput

Doubles = NDArray[np.float64]

SAMPLED = 40_000  # values that are compared
SIMPLER = 0.01  # of two equally similar candidates, that with fewer causes is the more similar one


def scored(
    candidates: Iterable[Candidate], references: Sequence[ReferenceOutput]
) -> Iterator[tuple[float, Candidate, ReferenceOutput]]:
    for candidate in candidates:
        for reference in references:
            if reference.array.shape == candidate.layout.shape:
                yield similarity(candidate, reference), candidate, reference


def over_time(candidate: Candidate, reference: ReferenceOutput) -> float:
    """Return the correlation of the values' deviations from the means of their channels, 0 to 1."""
    x, r = _samples(candidate, reference)
    known = np.isfinite(x).all(axis=1)
    if np.count_nonzero(known) < 8:
        return 0.0
    x, r = x[known], r[known]
    return max(0.0, _correlation(x - x.mean(axis=0), r - r.mean(axis=0)))


def shared_error(candidate: Candidate, exact: ReferenceOutput, simulated: ReferenceOutput) -> float:
    """Return the same correlation of a file and a simulation, without what both have of the exact output.

    It is large only if the file has the errors of the simulation.
    """
    x, r = _samples(candidate, exact)
    known = np.isfinite(x).all(axis=1)
    if np.count_nonzero(known) < 8:
        return 0.0
    x, r, s = (
        a - a.mean(axis=0) for a in (x[known], r[known], _samples(candidate, simulated)[1][known])
    )
    size = max(float(np.vdot(r, r)), 1e-300)
    x, s = (a - r * (float(np.vdot(a, r)) / size) for a in (x, s))
    return max(0.0, _correlation(x, s))


def _samples(candidate: Candidate, reference: ReferenceOutput) -> tuple[Doubles, Doubles]:
    """Return the values of some frames of a file and of a reference, (f, C) each."""
    index = _sampled_frames(*reference.frames.shape)
    key = (reference.frame_axis, reference.array.shape)
    if key not in candidate.samples:
        candidate.samples[key] = _robust(_sample(candidate, reference, index))
    return candidate.samples[key], reference.frames[index]


@np.errstate(invalid="ignore", over="ignore")
def similarity(candidate: Candidate, reference: ReferenceOutput) -> float:
    """Return how similar a reading in a layout is to a reference, 0 to 1."""
    x, r = _samples(candidate, reference)
    known = np.isfinite(x)
    if np.count_nonzero(known) < 8:
        return 0.0
    scores = [_correlation(x[known], r[known])]
    if r.shape[0] >= 8 and r.shape[1] >= 8:
        x0, r0 = np.where(known, x, 0), np.where(known, r, 0)
        columns, rows = known.any(axis=0), known.any(axis=1)
        scores.append(_correlation(x0.sum(0)[columns], r0.sum(0)[columns]))
        scores.append(0.8 * _correlation(x0.std(1)[rows], r0.std(1)[rows]))
    return max(scores) - SIMPLER * candidate.causes


def _sampled_frames(frames: int, channels: int) -> NDArray[np.int64]:
    count = min(frames, max(32, SAMPLED // channels))
    return np.unique(np.linspace(0, frames - 1, count).astype(np.int64))


def _sample(candidate: Candidate, reference: ReferenceOutput, index: NDArray[np.int64]) -> Doubles:
    """Return the values of some frames, (f, C); NaN for values that are missing or were not written."""
    values, layout = _written(candidate.reading.values), candidate.layout
    if values.size < layout.size:
        missing = np.full(layout.size - values.size, np.nan, np.float32)
        values = np.concatenate([values, missing])
    tensor = layout.view(values)
    if reference.frame_axis is None:
        return tensor.reshape(1, -1).astype(np.float64)
    few = np.take(tensor, index, axis=reference.frame_axis)
    sampled: Doubles = (
        np.moveaxis(few, reference.frame_axis, 0).reshape(index.size, -1).astype(np.float64)
    )
    return sampled


def _written(values: Floats) -> Floats:
    """Return the values of a file with NaN for a run of equal values at either end."""
    there = np.isfinite(values)
    for at_end in (True, False):
        if run := constant_run(values, there, at_end=at_end):
            values = np.where(run.mask, np.float32(np.nan), values)
            there = there & ~run.mask
    return values


def _robust(x: Doubles) -> Doubles:
    """Clip values far outside of the usual range: a wrong reading has values up to 1e38."""
    finite = x[np.isfinite(x)]
    if not finite.size:
        return x
    low, middle, high = np.percentile(finite, (2, 50, 98))
    reach = 10 * max(high - low, 1e-30)
    return np.where(np.isfinite(x), np.clip(x, middle - reach, middle + reach), np.nan)


def _correlation(x: Doubles, r: Doubles) -> float:
    """Return the correlation of values, less what chance makes of few of them."""
    if x.size < 8:
        return 0.0
    x, r = x - x.mean(), r - r.mean()
    size = float(np.sqrt((x * x).sum() * (r * r).sum()))
    return abs(float((x * r).sum())) / size - 1 / math.sqrt(x.size) if size > 0 else 0.0
