"""Explain a file by one hypothesis: the fit, and what its errors show.

Parts of a file may be missing, constant or of another output. Channels may have factors of their own, and
values may be clipped. Each counts as a cause only if it lowers the error enough.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from whisperport.diagnosis import channels
from whisperport.diagnosis.buffers import (
    Region,
    region_between,
    split_between,
    stale_finding,
    stale_region,
    tail_finding,
)
from whisperport.diagnosis.causes import CauseCode
from whisperport.diagnosis.explanation import ROUNDING_FACTOR, Explanation, Hypothesis
from whisperport.diagnosis.file_values import FileValues, file_values
from whisperport.diagnosis.fitting import (
    Fitted,
    best_fits,
    is_constant,
    moved_causes,
    rounding_of,
)
from whisperport.diagnosis.geometries import Geometry, in_order
from whisperport.diagnosis.reference_outputs import ReferenceOutput
from whisperport.diagnosis.result import Finding
from whisperport.diagnosis.saturation import saturation_finding
from whisperport.diagnosis.scales import PER_CAUSE_DB, SMALLEST, BlockSums, line_findings
from whisperport.diagnosis.signedness import moved_further

Doubles = NDArray[np.float64]
Mask = NDArray[np.bool_]

NO_ERROR = 1e-9  # an error below this part of the mean square is that of float32
STALE_PART = 0.2  # a part of another output must lower the error to this part: by 7 dB
REST_OF_CHANGE = 0.1  # error with factors of channels, in parts of the values' change over time
OWN_PART = 0.02  # part of a file with a stale part that must hold the reference
MOST_REST = 0.03  # error up to which factors of channels explain a file: 15 dB, of layers in 7 bits
REST_OF_ERROR = 1 / 30  # factors of channels must lower the error to this part: by 15 dB
UNKNOWN = "another output, or to none"
TRIALS = 1e8  # hypotheses that are compared for 1,000 files: readings, layouts, outputs, shifts
MANY = 2  # more causes than this must explain the file completely
SIGNIFICANT = 0.6  # the error must be below this part of what chance explains: by 2 dB


@dataclass(frozen=True, slots=True, eq=False)
class _Corrected:
    """The values with scale and offset undone, by one line or by one factor per channel.

    Attributes:
        values: (n,) the corrected values.
        used: (n,) whether a value counts.
        findings: the causes.
        code: lines of numpy that undo them.
        frame_code: lines that undo them on (F, C).
        saturated: the finding that values are clipped; None if they are not.
    """

    values: Doubles
    used: Mask
    findings: tuple[Finding, ...]
    code: tuple[str, ...] = ()
    frame_code: tuple[str, ...] = ()
    saturated: Finding | None = None


def explain(hypothesis: Hypothesis, others: Sequence[ReferenceOutput]) -> Explanation | None:
    """Fit a hypothesis.

    Args:
        hypothesis: the reading, the layout and the reference.
        others: other outputs of the same shape, which a stale part of the file may hold.

    Returns:
        The simplest explanation; None if the file holds too few values.
    """
    data = file_values(hypothesis)
    if np.count_nonzero(data.usable) < 8:
        return None
    fitted = best_fits(data)
    if fitted and hypothesis.reading.moved is not None:
        data = file_values(_with_moved(data, fitted[0]))
        fitted = best_fits(data)
    explanations = (_explanation(data, one, others) for one in fitted)
    found = min((e for e in explanations if e), key=lambda e: e.cost_db, default=None)
    if found is None or found.error > _chance(int(np.count_nonzero(np.isfinite(found.corrected)))):
        return None
    if len(found.findings) > MANY and not found.is_complete(SMALLEST):
        return None
    return found


def _with_moved(data: FileValues, fitted: Fitted) -> Hypothesis:
    """Return the hypothesis with the distance by which values were moved, fitted together with the line."""
    hypothesis = data.hypothesis
    assert hypothesis.reading.moved is not None
    usable = data.usable & fitted.held & fitted.in_agreement
    moved = hypothesis.layout.pick(_filled(hypothesis.reading.moved, hypothesis.layout.size))[
        usable
    ]
    terms = np.stack([fitted.r[usable], np.ones(moved.size), moved.astype(np.float64)], axis=1)
    distance = float(np.linalg.lstsq(terms, data.x[usable], rcond=None)[0][2])
    return replace(hypothesis, reading=moved_further(hypothesis.reading, -distance))


def _filled(values: Mask, size: int) -> Mask:
    """Return values with as many False as are missing at the end."""
    return np.concatenate([values, np.zeros(max(0, size - values.size), bool)])


def _chance(count: int) -> float:
    """Return the largest error that is not chance when many hypotheses are fitted to `count` values.

    A line that is fitted to n unrelated values leaves a part below e of their variance with a probability
    of about e^((n - 2) / 2).
    """
    return SIGNIFICANT * TRIALS ** (-2 / (count - 2)) if count > 2 else 0.0


def _explanation(
    data: FileValues, fitted: Fitted, others: Sequence[ReferenceOutput]
) -> Explanation | None:
    """Add what is found from the errors: stale parts, factors per channel, saturation."""
    hypothesis, reference = data.hypothesis, data.hypothesis.reference
    used = data.written & fitted.held
    stale = _stale(data, fitted, used, others)
    if stale:
        used &= ~stale[0].mask
    corrected = _by_factors(data, fitted, used) or _by_line(data, fitted, used)
    used = corrected.used
    findings = (
        *hypothesis.findings,
        *_read(data, corrected),
        *hypothesis.layout.findings,
        *moved_causes(reference, fitted.geometry, fitted.fit.error, fitted.floor),
        *corrected.findings,
        *_of_parts(data, fitted, stale),
        *([corrected.saturated] if corrected.saturated else []),
        *([_not_finite(data)] if data.not_finite else []),
        *reference.findings,
    )
    error = _mean_error(corrected.values, fitted.r, used, reference.mean_square)
    floor = rounding_of(hypothesis.reading, fitted.fit.line, reference.mean_square)
    has_unknown_part = bool(stale and not stale[1])  # any rest can be called another output
    priced = len(findings) + has_unknown_part
    return Explanation(
        hypothesis,
        findings,
        (
            *hypothesis.code,
            *hypothesis.reading.code,
            *corrected.code,
            *hypothesis.layout.code(),
            *_on_frames(reference, (*corrected.frame_code, *fitted.geometry.code)),
        ),
        error,
        floor,
        10 * math.log10(max(error, floor, SMALLEST)) + PER_CAUSE_DB * priced,
        _restored(data, fitted.geometry, corrected.values, used),
        has_unknown_part,
    )


def _by_line(data: FileValues, fitted: Fitted, used: Mask) -> _Corrected:
    """Undo the line; leave out the values that were clipped."""
    line, reading = fitted.fit.line, data.hypothesis.reading
    spread = math.sqrt(data.hypothesis.reference.mean_square)
    findings, code = line_findings(fitted.fit, reading, spread)
    saturated = saturation_finding(data.limits, line.a * fitted.r + line.b, used)
    return _Corrected(
        (data.x - line.b) / line.a,
        used & ~data.limits.mask if saturated else used,
        tuple(findings),
        tuple(code),
        saturated=saturated,
    )


def _by_factors(data: FileValues, fitted: Fitted, used: Mask) -> _Corrected | None:
    """Undo one factor per channel; None if this is not much better than the line."""
    line, reference = fitted.fit.line, data.hypothesis.reference
    inside = used & ~data.limits.mask
    error = _mean_error((data.x - line.b) / line.a, fitted.r, inside, reference.mean_square)
    found = _factors(data, fitted, inside, error)
    if found is None:
        return None
    values, factors = found
    return _Corrected(
        values,
        used,
        (channels.factor_finding(factors),),
        frame_code=channels.factor_code(factors),
    )


def _of_parts(
    data: FileValues, fitted: Fitted, stale: tuple[Region, str] | None
) -> tuple[Finding, ...]:
    """Return the causes of parts that hold a constant or another output."""
    findings = []
    if is_constant(data.tail, data.exists & fitted.held):
        findings.append(tail_finding(data.tail, data.x.size))
    elif is_constant(data.head, data.exists & fitted.held):
        findings.append(stale_finding(data.head, data.x.size, ""))
    if stale:
        region, origin = stale
        findings.append(stale_finding(region, data.x.size, origin or UNKNOWN))
    return tuple(findings)


def _read(data: FileValues, corrected: _Corrected) -> tuple[Finding, ...]:
    """Return the causes of the reading; those of stored integers with the fitted zero point and scale."""
    reading = data.hypothesis.reading
    if not reading.are_stored:
        return reading.findings
    fitted = corrected.code[0].partition("  #")[0]
    return tuple(
        replace(f, sentence=f"{f.sentence} This fits them best: {fitted}.")
        if f.cause is CauseCode.INTEGERS_READ_AS_FLOATS
        else f
        for f in reading.findings
    )


def _stale(
    data: FileValues,
    fitted: Fitted,
    used: Mask,
    others: Sequence[ReferenceOutput],
) -> tuple[Region, str] | None:
    """Return the part of the file that holds something else, and what; "" if that is not known."""
    if fitted.fit.error <= max(ROUNDING_FACTOR * fitted.floor, NO_ERROR):
        return None
    line = fitted.fit.line
    predicted = line.a * fitted.r + line.b
    usable = data.usable & used
    own = BlockSums(data.x, fitted.r, usable)
    own_errors = own.errors(line) * own.n * own.mean_square
    best: tuple[float, int, bool, Doubles, str] | None = None
    for other in others:
        r, _ = in_order(data, fitted.geometry, other)
        sums = BlockSums(data.x, r, usable)
        if not sums.mean_square > 0:
            continue
        errors = sums.errors(line) * sums.n * sums.mean_square
        if (found := split_between(own_errors, errors)) and (not best or found[0] < best[0]):
            best = (*found, r, other.described)
    if best is None or best[0] > STALE_PART:
        region = stale_region(fitted.fit.blocks, fitted.floor, data.x, predicted, used)
        return (region, "") if region else None
    _, split, at_end, r, described = best
    mine = np.where(used, np.square(data.x - predicted), 0.0)
    others_errors = np.where(used, np.square(data.x - line.a * r - line.b), 0.0)
    region = region_between(mine, others_errors, own.starts, split, at_end=at_end)
    if np.count_nonzero(used & ~region.mask) < OWN_PART * np.count_nonzero(used):
        return None  # the file holds the other output
    return region, described


def _factors(
    data: FileValues, fitted: Fitted, used: Mask, error: float
) -> tuple[Doubles, Doubles] | None:
    """Return the values with one factor per channel undone, and the factors, if the error is much lower."""
    if error <= max(ROUNDING_FACTOR * fitted.floor, SMALLEST) or data.hypothesis.reading.are_stored:
        return None
    x, r = data.in_frames(data.x), data.in_frames(fitted.r)
    ok = data.in_frames(used.astype(np.float64)) > 0.5
    found = channels.factors(x, r, ok)
    if found is None:
        return None
    corrected = data.in_file(x / found)
    lower = _mean_error(corrected, fitted.r, used, data.hypothesis.reference.mean_square)
    if (
        lower > max(REST_OF_ERROR * error, ROUNDING_FACTOR * fitted.floor, SMALLEST)
        or lower > MOST_REST
    ):
        return None  # factors of channels also fit errors that are constant over time
    rest = float(np.mean(np.square(data.in_frames(corrected) - r), where=ok))
    change = channels.change_over_time(r, ok)
    if (
        rest >= REST_OF_CHANGE * change
        or change <= NO_ERROR * data.hypothesis.reference.mean_square
    ):
        return None  # and they fit any output to frames that do not change
    return corrected, found


def _mean_error(corrected: Doubles, r: Doubles, used: Mask, mean_square: float) -> float:
    count = int(np.count_nonzero(used))
    if not count:
        return math.inf
    local = float(np.sum(np.square(r), where=used)) / count
    error = float(np.sum(np.square(corrected - r), where=used)) / count
    return error / max(local, 1e-3 * mean_square, 1e-300)


def _not_finite(data: FileValues) -> Finding:
    return Finding(
        cause=CauseCode.NOT_FINITE,
        sentence=f"{data.not_finite:,} of {data.x.size:,} values are NaN or infinite.",
        advice="Look for an overflow of float16 on the device: run the program in float32, or with "
        "16-bit integers.",
    )


def _restored(data: FileValues, geometry: Geometry, corrected: Doubles, used: Mask) -> Doubles:
    """Return the corrected values in the shape of the output, NaN where the file holds none."""
    values = data.in_frames(np.where(used, corrected, np.nan))
    out = values
    if geometry.channel_map is not None:
        out = np.empty_like(values)
        out[:, geometry.channel_map] = values
    if geometry.frame_map is not None:
        moved = np.full_like(out, np.nan)
        known = geometry.frame_map >= 0
        moved[geometry.frame_map[known][::-1]] = out[known][::-1]
        out = moved
    restored: Doubles = data.hypothesis.reference.from_frames(out)
    return restored


def _on_frames(reference: ReferenceOutput, code: tuple[str, ...]) -> tuple[str, ...]:
    """Return lines of numpy for (F, C) as lines for the output's shape."""
    axis = reference.frame_axis
    if not code or axis is None:
        return ()
    into = [f"x = np.moveaxis(x, {axis}, 0)", "moved = x.shape; x = x.reshape(len(x), -1)"]
    return (*into, *code, f"x = np.moveaxis(x.reshape(moved), 0, {axis})")
