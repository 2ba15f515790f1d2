"""Fit one hypothesis (a reading, a layout and a reference): find which further causes make both agree.

In the order of the file, without padding, the hypothesis is

    x = clip(a · r[frames, channels] + b)

with a frame map, a channel map, a line and limits. Parts of the file may be missing, constant or of another
output. Each part is found from the values, and counts as a cause only if it lowers the error enough.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from whisperport.diagnosis import channels, frames
from whisperport.diagnosis.buffers import (
    Region,
    constant_run,
    region_between,
    split_between,
    stale_finding,
    stale_region,
    tail_finding,
)
from whisperport.diagnosis.causes import CauseCode
from whisperport.diagnosis.layouts import Layout
from whisperport.diagnosis.readings import Reading
from whisperport.diagnosis.reference_outputs import ReferenceOutput
from whisperport.diagnosis.result import Finding
from whisperport.diagnosis.saturation import Limits, limits_of, saturation_finding
from whisperport.diagnosis.scales import (
    PER_CAUSE_DB,
    SMALLEST,
    BlockSums,
    Line,
    ScaleFit,
    block_starts,
    fits,
    line_findings,
    swapped_fit,
)
from whisperport.diagnosis.signedness import moved_further

Doubles = NDArray[np.float64]
Mask = NDArray[np.bool_]

ROUNDING_FACTOR = 3.0  # an error up to this multiple of the rounding's mean square is rounding
MOST_ROUNDING = 0.01  # of the mean square (20 dB): more is no storage of an output
NO_ERROR = 1e-9  # an error below this part of the mean square is that of float32
STALE_PART = 0.2  # a part of another output must lower the error to this part: by 7 dB
REST_OF_CHANGE = 0.1  # error with factors of channels, in parts of the values' change over time
OWN_PART = 0.02  # part of a file with a stale part that must hold the reference
MOST_REST = 0.03  # error up to which factors of channels explain a file: 15 dB, of layers in 7 bits
REST_OF_ERROR = 1 / 30  # factors of channels must lower the error to this part: by 15 dB
UNKNOWN = "another output, or to none"
TRIALS = 1e8  # hypotheses that are compared for 1,000 files: readings, layouts, outputs, shifts
MANY = 2  # more causes than this must explain the file completely
AGREEING = (
    3e-3  # error of a block that agrees with the reference, in parts of the mean square (25 dB)
)
FEWEST_BLOCKS = 8  # of 256, that agree with one order of frames and channels and not with another
CAUSE = 10 ** (-PER_CAUSE_DB / 10)  # the part of an error that a further cause may leave
SIGNIFICANT = 0.6  # the error must be below this part of what chance explains: by 2 dB


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """What a file may hold: a reading of its bytes, a layout, and an output."""

    reading: Reading
    layout: Layout
    reference: ReferenceOutput
    findings: tuple[Finding, ...] = ()  # causes of the file's size
    code: tuple[str, ...] = ()  # lines that cut the file


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """A hypothesis with everything that was fitted.

    Attributes:
        hypothesis: the hypothesis.
        findings: all causes, in the order in which they are undone.
        code: lines of numpy that undo them.
        error: mean square error divided by the reference's mean square, over the values that exist.
        floor: the part of it that rounding explains.
        cost_db: the error in dB plus the price of the causes.
        corrected: the values with all corrections, in the shape of the output; NaN where none exists.
        has_unknown_part: whether a part of the file belongs to no output that it was compared with.
    """

    hypothesis: Hypothesis
    findings: tuple[Finding, ...]
    code: tuple[str, ...]
    error: float
    floor: float
    cost_db: float
    corrected: Doubles
    has_unknown_part: bool = False

    @property
    def sqnr_db(self) -> float:
        """The signal-to-error ratio after all corrections, in dB."""
        return -10 * math.log10(max(self.error, 1e-30))

    def is_complete(self, tolerance: float) -> bool:
        """Whether the rest of the error is rounding, or at most `tolerance` of the mean square."""
        return self.error <= max(ROUNDING_FACTOR * self.floor, tolerance)


@dataclass(frozen=True, slots=True, eq=False)
class _Geometry:
    """Which frame and channel of the reference each value of the file holds, and what that means."""

    frame_map: frames.FrameMap | None = None
    channel_map: channels.ChannelMap | None = None
    findings: tuple[Finding, ...] = ()
    code: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Data:
    """The values of a hypothesis in the order of the file."""

    hypothesis: Hypothesis
    x: Doubles  # (n,) values; 0 where there is none
    exists: Mask  # (n,) whether the file is long enough and the value is finite
    not_finite: int
    missing: int
    tail: Region  # constant values at the end
    head: Region  # constant values at the beginning
    limits: Limits
    factors: Doubles | None = field(default=None)

    @property
    def written(self) -> Mask:
        """The values that are finite and no part of a constant end."""
        mask: Mask = self.exists & ~self.tail.mask & ~self.head.mask
        return mask

    @property
    def usable(self) -> Mask:
        """The values that the fit uses: those that were written and not clipped."""
        mask: Mask = self.written & ~self.limits.mask
        return mask

    def in_frames(self, values: Doubles) -> Doubles:
        """Return values in the order of the file as (F, C)."""
        return self.hypothesis.reference.in_frames(self.hypothesis.layout.restore(values))

    def in_file(self, values: Doubles) -> Doubles:
        """Return values (F, C) in the order of the file."""
        reference = self.hypothesis.reference
        stored: Doubles = self.hypothesis.layout.arrange(reference.from_frames(values))
        return stored


@dataclass(frozen=True, slots=True, eq=False)
class _Fitted:
    geometry: _Geometry
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


def explain(hypothesis: Hypothesis, others: Sequence[ReferenceOutput]) -> Explanation | None:
    """Fit a hypothesis.

    Args:
        hypothesis: the reading, the layout and the reference.
        others: other outputs of the same shape, which a stale part of the file may hold.

    Returns:
        The simplest explanation; None if the file holds too few values.
    """
    data = _data(hypothesis)
    if np.count_nonzero(data.usable) < 8:
        return None
    fitted = _best(data)
    if fitted and hypothesis.reading.moved is not None:
        data = _data(_with_moved(data, fitted[0]))
        fitted = _best(data)
    explanations = (_explanation(data, one, others) for one in fitted)
    found = min((e for e in explanations if e), key=lambda e: e.cost_db, default=None)
    if found is None or found.error > _chance(int(np.count_nonzero(np.isfinite(found.corrected)))):
        return None
    if len(found.findings) > MANY and not found.is_complete(SMALLEST):
        return None
    return found


def _with_moved(data: _Data, fitted: _Fitted) -> Hypothesis:
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


def _data(hypothesis: Hypothesis) -> _Data:
    values, layout = hypothesis.reading.values, hypothesis.layout
    missing = max(0, layout.size - values.size)
    if missing:
        values = np.concatenate([values, np.full(missing, np.nan, np.float32)])
    picked = layout.pick(values)
    positions = layout.pick(np.arange(layout.size)) if missing else None
    there = np.ones(picked.size, bool) if positions is None else positions < layout.size - missing
    finite = np.isfinite(picked)
    x = np.where(finite, picked, 0).astype(np.float64)
    exists = there & finite
    tail, head = constant_run(x, there, at_end=True), constant_run(x, there, at_end=False)
    limits = limits_of(x, exists & ~tail.mask & ~head.mask)
    return _Data(
        hypothesis,
        x,
        exists,
        int(np.count_nonzero(there & ~finite)),
        int(np.count_nonzero(~there)),
        tail,
        head,
        limits,
    )


def _best(data: _Data) -> list[_Fitted]:
    """Return the cheapest geometry with its line; the search ends when the rest is rounding.

    If another geometry makes a larger part of the file agree exactly, it is returned, too: the rest of the
    file may hold something else. So is the one that explains most with one factor per channel.
    """
    best = most = by_factors = _fit(data, _Geometry())
    if best is not None and _is_done(best):
        return [best]
    rest = _rest_of_factors(data, best)
    for geometry in _geometries(data):
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


def _rest_of_factors(data: _Data, fitted: _Fitted | None) -> float:
    """Return the part of the file's square that one factor per channel leaves unexplained."""
    if fitted is None or data.hypothesis.reading.are_stored:
        return 1.0
    x = data.in_frames(np.where(data.usable & fitted.held, data.x, 0.0))
    r = data.in_frames(np.where(data.usable & fitted.held, fitted.r, 0.0))
    return channels.rest_of_factors(x, r)


def _is_done(fitted: _Fitted) -> bool:
    return not fitted.has_run and fitted.fit.error <= max(ROUNDING_FACTOR * fitted.floor, SMALLEST)


def _geometries(data: _Data) -> Iterator[_Geometry]:
    reference = data.hypothesis.reference
    r = reference.frames
    written = data.written  # clipped values still show the order
    mean = float(np.mean(data.x, where=written))
    x = data.in_frames(np.where(written, data.x, mean))
    known = data.in_frames(written.astype(np.float64)).mean(axis=1) > 0.5
    for frame_map, moved, code in _frame_maps(x, r):
        if frame_map is not None:
            yield _Geometry(frame_map, None, moved, code)
        held = known if frame_map is None else known & (frame_map >= 0)
        there = r if frame_map is None else r[frame_map]
        if frame_map is not None and not frames.are_alike(x[held], there[held]):
            continue  # the comparison of all channels takes long
        order = channels.likely_map(x[held], there[held])
        if order is not None:
            findings = (*moved, channels.block_finding(order))
            back = f"x = x[:, np.argsort({_listed(order)})]"
            yield _Geometry(frame_map, order, findings, (*code, back))


def _frame_maps(
    x: Doubles, r: Doubles
) -> Iterator[tuple[frames.FrameMap | None, tuple[Finding, ...], tuple[str, ...]]]:
    """Yield the expected order of frames, shifts and repetitions, each with its causes and code."""
    count = r.shape[0]
    yield None, (), ()
    for n in frames.likely_shifts(x, r):
        for circular in (True, False):
            finding, code = frames.shift_finding(n, count, circular=circular)
            yield frames.shifted(count, n, circular=circular), (finding,), tuple(code)
    for sentence, repeated in frames.repeated_maps(count):
        yield repeated, (frames.repeat_finding(sentence),), ()
    found = frames.replaced_frames(x, r)
    if found is not None:
        replaced, sentence = found
        yield replaced, (frames.repeat_finding(sentence),), ()


def _listed(order: channels.ChannelMap) -> str:
    """Return numpy code for an order of channels, by its runs."""
    breaks = [0, *(np.flatnonzero(np.diff(order) != 1) + 1).tolist(), order.size]
    runs = [f"np.arange({order[a]}, {order[b - 1] + 1})" for a, b in pairwise(breaks)]
    return f"np.concatenate([{', '.join(runs)}])"


def _fit(data: _Data, geometry: _Geometry) -> _Fitted | None:
    """Fit the line of a geometry."""
    r, held = _reference(data, geometry)
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
    has_run = any(_is_constant(run, there) for run in (data.tail, data.head) if run)
    best: _Fitted | None = None
    for fit in candidates:
        floor = _rounding(reading, fit.line, sums.mean_square)
        moved = len(_moved(data.hypothesis.reference, geometry, fit.error, floor))
        cost = fit.cost_db(max(floor, SMALLEST)) + PER_CAUSE_DB * (moved + has_run)
        if best is None or cost < best.cost_db:
            best = _Fitted(geometry, r, held, fit, floor, cost, has_run)
    return best


def _rounding(reading: Reading, line: Line, mean_square: float) -> float:
    """Return the rounding error in parts of the reference's mean square.

    A rounding as large as the values themselves explains any error, so it is not counted completely.
    """
    return min(reading.rounding / (line.a**2 * mean_square), MOST_ROUNDING)


def _moved(
    reference: ReferenceOutput, geometry: _Geometry, error: float, floor: float
) -> tuple[Finding, ...]:
    """Return the causes of a geometry.

    Of other windows, only some are known: a shift to the nearest one is no cause of its own, unless the
    file holds exactly its frames.
    """
    if reference.is_window and error > max(ROUNDING_FACTOR * floor, SMALLEST):
        return tuple(f for f in geometry.findings if f.cause is not CauseCode.FRAME_SHIFT)
    return geometry.findings


def _reference(
    data: _Data, geometry: _Geometry, output: ReferenceOutput | None = None
) -> tuple[Doubles, Mask]:
    """Return the reference in the order of the file, and where the file holds a value of it.

    Args:
        data: the file.
        geometry: the order of frames and channels.
        output: another output than that of the hypothesis.
    """
    r = (output or data.hypothesis.reference).frames
    held = np.ones(r.shape[0], bool)
    if geometry.frame_map is not None:
        held = geometry.frame_map >= 0
        r = np.where(held[:, None], r[geometry.frame_map], 0.0)
    if geometry.channel_map is not None:
        r = r[:, geometry.channel_map]
    if held.all():
        return data.in_file(r), np.ones(data.x.size, bool)
    mask = np.broadcast_to(held[:, None], r.shape).astype(np.float64)
    return data.in_file(r), data.in_file(mask) > 0.5


def _explanation(
    data: _Data, fitted: _Fitted, others: Sequence[ReferenceOutput]
) -> Explanation | None:
    """Add what is found from the errors: stale parts, factors per channel, saturation."""
    hypothesis, line = data.hypothesis, fitted.fit.line
    reading, reference = hypothesis.reading, hypothesis.reference
    mean_square = reference.mean_square
    findings: list[Finding] = []
    used = data.written & fitted.held
    predicted = line.a * fitted.r + line.b
    if stale := _stale(data, fitted, predicted, used, others):
        region, origin = stale
        findings.append(stale_finding(region, data.x.size, origin or UNKNOWN))
        used &= ~region.mask
    frame_code = fitted.geometry.code
    corrected = (data.x - line.b) / line.a
    error = _mean_error(corrected, fitted.r, used & ~data.limits.mask, mean_square)
    per_channel = _factors(data, fitted, used & ~data.limits.mask, error)
    line_found, line_code = line_findings(fitted.fit, reading, math.sqrt(mean_square))
    if per_channel is not None:
        corrected, error, factors = per_channel
        line_found, line_code = [channels.factor_finding(factors)], []
        frame_code = (*channels.factor_code(factors), *frame_code)
    saturated = saturation_finding(data.limits, predicted, used) if per_channel is None else None
    if saturated:
        findings.append(saturated)
        used &= ~data.limits.mask
    error = _mean_error(corrected, fitted.r, used, mean_square)
    if _is_constant(data.tail, data.exists & fitted.held):
        findings.insert(0, tail_finding(data.tail, data.x.size))
    elif _is_constant(data.head, data.exists & fitted.held):
        findings.insert(0, stale_finding(data.head, data.x.size, ""))
    if data.not_finite:
        findings.append(_not_finite(data))
    read = reading.findings
    if reading.are_stored:
        read = tuple(_with_scale(finding, line_code) for finding in read)
    everything = (
        *hypothesis.findings,
        *read,
        *hypothesis.layout.findings,
        *_moved(reference, fitted.geometry, fitted.fit.error, fitted.floor),
        *line_found,
        *findings,
        *reference.findings,
    )
    floor = _rounding(reading, line, mean_square)
    cost = 10 * math.log10(max(error, floor, SMALLEST)) + PER_CAUSE_DB * len(everything)
    has_unknown_part = bool(stale and not stale[1])
    if has_unknown_part:
        cost += PER_CAUSE_DB  # any rest can be called another output
    restored = _restored(data, fitted.geometry, corrected, used)
    code = (
        *hypothesis.code,
        *reading.code,
        *line_code,
        *hypothesis.layout.code(),
        *_on_frames(reference, frame_code),
    )
    return Explanation(hypothesis, everything, code, error, floor, cost, restored, has_unknown_part)


def _with_scale(finding: Finding, line_code: list[str]) -> Finding:
    """Add the fitted zero point and scale to the finding about stored integers."""
    if finding.cause is not CauseCode.INTEGERS_READ_AS_FLOATS:
        return finding
    fitted = line_code[0].partition("  #")[0]
    return replace(finding, sentence=f"{finding.sentence} This fits them best: {fitted}.")


def _mean_error(corrected: Doubles, r: Doubles, used: Mask, mean_square: float) -> float:
    count = int(np.count_nonzero(used))
    if not count:
        return math.inf
    local = float(np.sum(np.square(r), where=used)) / count
    error = float(np.sum(np.square(corrected - r), where=used)) / count
    return error / max(local, 1e-3 * mean_square, 1e-300)


def _stale(
    data: _Data,
    fitted: _Fitted,
    predicted: Doubles,
    used: Mask,
    others: Sequence[ReferenceOutput],
) -> tuple[Region, str] | None:
    """Return the part of the file that holds something else, and what; "" if that is not known."""
    if fitted.fit.error <= max(ROUNDING_FACTOR * fitted.floor, NO_ERROR):
        return None
    usable = data.usable & used
    own = BlockSums(data.x, fitted.r, usable)
    own_errors = own.errors(fitted.fit.line) * own.n * own.mean_square
    best: tuple[float, int, bool, Doubles, str] | None = None
    for other in others:
        r, _ = _reference(data, fitted.geometry, other)
        sums = BlockSums(data.x, r, usable)
        if not sums.mean_square > 0:
            continue
        errors = sums.errors(fitted.fit.line) * sums.n * sums.mean_square
        if (found := split_between(own_errors, errors)) and (not best or found[0] < best[0]):
            best = (*found, r, other.described)
    if best is None or best[0] > STALE_PART:
        region = stale_region(fitted.fit.blocks, fitted.floor, data.x, predicted, used)
        return (region, "") if region else None
    _, split, at_end, r, described = best
    a, b = fitted.fit.line.a, fitted.fit.line.b
    mine = np.where(used, np.square(data.x - predicted), 0.0)
    others_errors = np.where(used, np.square(data.x - a * r - b), 0.0)
    region = region_between(mine, others_errors, own.starts, split, at_end=at_end)
    if np.count_nonzero(used & ~region.mask) < OWN_PART * np.count_nonzero(used):
        return None  # the file holds the other output
    return region, described


def _factors(
    data: _Data, fitted: _Fitted, used: Mask, error: float
) -> tuple[Doubles, float, Doubles] | None:
    """Return values with one factor per channel undone, their error, and the factors, if much better."""
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
    return corrected, lower, found


def _is_constant(region: Region, there: Mask) -> bool:
    return bool(np.count_nonzero(region.mask & there) >= 8)


def _not_finite(data: _Data) -> Finding:
    return Finding(
        cause=CauseCode.NOT_FINITE,
        sentence=f"{data.not_finite:,} of {data.x.size:,} values are NaN or infinite.",
        advice="Look for an overflow of float16 on the device: run the program in float32, or with "
        "16-bit integers.",
    )


def _restored(data: _Data, geometry: _Geometry, corrected: Doubles, used: Mask) -> Doubles:
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
