"""Explain a file by one candidate and one output: the fit, and what its errors show.

Parts of a file may be missing, constant or of another output, and values may be clipped. Each counts as a
cause only if it lowers the error enough.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from whisperport.program.runner import Array
from whisperport.verification.diagnosis.buffers import (
    Region,
    region_between,
    saturation_finding,
    split_between,
    stale_finding,
    tail_finding,
)
from whisperport.verification.diagnosis.candidates import Candidate, FileValues, file_values
from whisperport.verification.diagnosis.causes import CauseCode, Finding
from whisperport.verification.diagnosis.expected import Expected, ExpectedTensor, Simulate
from whisperport.verification.diagnosis.fitting import (
    ROUNDING_FACTOR,
    Fitted,
    best_fits,
    is_constant,
    moved_causes,
    rounding_of,
)
from whisperport.verification.diagnosis.geometries import Geometry, in_order, undone
from whisperport.verification.diagnosis.reference_outputs import ReferenceOutput
from whisperport.verification.diagnosis.scales import (
    PER_CAUSE_DB,
    SMALLEST,
    BlockSums,
    line_findings,
)

Doubles = NDArray[np.float64]
Mask = NDArray[np.bool_]

NO_ERROR = 1e-9  # an error below this part of the mean square is that of float32
STALE_PART = 0.2  # a part of another output must lower the error to this part: by 7 dB
UNRELATED = 0.1  # error of a part that holds something unknown, in parts of the mean square (10 dB)
AGREEING = UNRELATED / 30  # largest error of the other part then
OWN_PART = 0.02  # part of a file with a stale part that must hold the reference
OWN_PART_OF_UNKNOWN = 0.15  # the same if the other part is unknown: massive frames may be exact
UNKNOWN = "another output, or to none"
TRIALS = 1e8  # hypotheses that are compared for 1,000 files: readings, layouts, outputs, shifts
MANY = 2  # more causes than this must explain the file completely
SIGNIFICANT = 0.6  # the error must be below this part of what chance explains: by 2 dB


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """A candidate and an output with everything that was fitted.

    Attributes:
        candidate: how the file is read.
        reference: the output that it holds.
        findings: all causes, in the order in which they are undone.
        code: lines of numpy that undo them on the bytes `data` of the file.
        error: mean square error divided by the reference's mean square, over the values that exist.
        floor: the part of it that rounding explains.
        cost_db: the error in dB plus the price of the causes.
        corrected: the values with all corrections, in the shape of the output; NaN where none exists.
    """

    candidate: Candidate
    reference: ReferenceOutput
    findings: tuple[Finding, ...]
    code: tuple[str, ...]
    error: float
    floor: float
    cost_db: float
    corrected: Doubles

    @property
    def sqnr_db(self) -> float:
        """The signal-to-error ratio after all corrections, in dB."""
        return -10 * math.log10(max(self.error, 1e-30))

    @property
    def causes(self) -> set[CauseCode]:
        """The causes."""
        return {finding.cause for finding in self.findings}

    @property
    def is_complete(self) -> bool:
        """Whether the rest of the error is rounding, or that of float32."""
        return self.error <= max(ROUNDING_FACTOR * self.floor, SMALLEST)


def explain(
    candidate: Candidate, reference: ReferenceOutput, stale_outputs: Sequence[ReferenceOutput]
) -> Explanation | None:
    """Fit a candidate to an output.

    Args:
        candidate: the reading and the layout.
        reference: the output.
        stale_outputs: outputs that a stale part of the file may hold.

    Returns:
        The simplest explanation; None if the file holds too few values.
    """
    data = file_values(candidate, reference)
    if np.count_nonzero(data.usable) < 8:
        return None
    same = [
        o for o in stale_outputs if o is not reference and o.array.shape == reference.array.shape
    ]
    explanations = (_explanation(data, fitted, same) for fitted in best_fits(data))
    best = min(explanations, key=lambda e: e.cost_db, default=None)
    if best is None or best.error > _chance(int(np.count_nonzero(np.isfinite(best.corrected)))):
        return None
    if len(best.findings) > MANY and not best.is_complete:
        return None
    return best


def _chance(count: int) -> float:
    """Return the largest error that is not chance when many hypotheses are fitted to `count` values.

    A line that is fitted to n unrelated values leaves a part below e of their variance with a probability
    of about e^((n - 2) / 2).
    """
    return SIGNIFICANT * TRIALS ** (-2 / (count - 2)) if count > 2 else 0.0


def _explanation(
    data: FileValues, fitted: Fitted, stale_outputs: Sequence[ReferenceOutput]
) -> Explanation:
    """Add what is found from the errors: stale parts and saturation."""
    candidate, reference, line = data.candidate, data.reference, fitted.fit.line
    used = data.written & fitted.held
    stale = _stale(data, fitted, used, stale_outputs)
    if stale:
        used &= ~stale[0].mask
    of_line, line_code = line_findings(
        fitted.fit, candidate.reading, math.sqrt(reference.mean_square)
    )
    saturated = saturation_finding(data.limits, line.a * fitted.r + line.b, used)
    if saturated:
        used &= ~data.limits.mask
    corrected = (data.x - line.b) / line.a
    findings = (
        *candidate.findings,
        *_read(candidate, line_code),
        *candidate.layout.findings,
        *moved_causes(data, fitted.geometry, fitted.fit.error, fitted.floor),
        *of_line,
        *_of_parts(data, fitted, stale),
        *([saturated] if saturated else []),
        *([_not_finite(data)] if data.not_finite else []),
        *reference.findings,
    )
    error = _mean_error(corrected, fitted.r, used, reference.mean_square)
    floor = rounding_of(candidate.reading, line, reference.mean_square)
    has_unknown_part = bool(stale and not stale[1])  # any rest can be called another output
    priced = len(findings) + has_unknown_part
    in_frames = undone(fitted.geometry, data.in_frames(np.where(used, corrected, np.nan)))
    return Explanation(
        candidate,
        reference,
        findings,
        (
            *candidate.code,
            *line_code,
            *candidate.layout.code(),
            *on_frames(reference, fitted.geometry.code),
        ),
        error,
        floor,
        10 * math.log10(max(error, floor, SMALLEST)) + PER_CAUSE_DB * priced,
        reference.from_frames(in_frames),
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


def _read(candidate: Candidate, line_code: Sequence[str]) -> tuple[Finding, ...]:
    """Return the causes of the reading; those of stored integers with the fitted zero point and scale."""
    if not candidate.reading.are_stored:
        return candidate.reading.findings
    fitted = line_code[0].partition("  #")[0]
    return tuple(
        replace(f, sentence=f"{f.sentence} This fits them best: {fitted}.")
        if f.cause is CauseCode.INTEGERS_READ_AS_FLOATS
        else f
        for f in candidate.reading.findings
    )


def _stale(
    data: FileValues, fitted: Fitted, used: Mask, stale_outputs: Sequence[ReferenceOutput]
) -> tuple[Region, str] | None:
    """Return the part of the file that holds something else, and what; "" if that is not known.

    Each block of values is counted with its error against the expected output, or against the other one.
    Against something unknown, every value has the same error.
    """
    if fitted.fit.error <= max(ROUNDING_FACTOR * fitted.floor, NO_ERROR):
        return None
    line = fitted.fit.line
    size = line.a**2 * data.reference.mean_square
    usable = data.usable & used
    own = BlockSums(data.x, fitted.r, usable)
    own_errors = own.squares(line)
    best: tuple[float, int, bool, Doubles, str] | None = None
    for output in stale_outputs:
        r, _ = in_order(data, fitted.geometry, output)
        division = split_between(own_errors, BlockSums(data.x, r, usable).squares(line))
        if division and (best is None or division[0] < best[0]):
            best = (*division, np.square(data.x - line.a * r - line.b), output.described)
    is_known = best is not None and best[0] <= STALE_PART
    if not is_known and not data.reference.findings:  # with a wrong input, it would be two guesses
        division = split_between(own_errors, own.n * UNRELATED * size)
        best = (*division, np.full(data.x.size, UNRELATED * size), "") if division else None
    if best is None or not (is_known or best[-1] == ""):
        return None
    _, split, at_end, errors, described = best
    mine = np.where(used, np.square(data.x - line.a * fitted.r - line.b), 0.0)
    region = region_between(mine, np.where(used, errors, 0.0), own.starts, split, at_end=at_end)
    most = math.inf if described else AGREEING * size
    least = OWN_PART if described else OWN_PART_OF_UNKNOWN
    is_own = _is_own(mine, errors, usable, region.mask, least=least, most=most)
    return (region, described) if is_own else None


def _is_own(
    mine: Doubles, errors: Doubles, usable: Mask, stale: Mask, *, least: float, most: float
) -> bool:
    """Return whether the rest of a file with a stale part holds the reference.

    It must be large enough, its error small enough, and the other output must not explain it as well.
    """
    rest = usable & ~stale
    if np.count_nonzero(rest) < least * np.count_nonzero(usable) or not (usable & stale).any():
        return False
    error = float(np.mean(mine[rest]))
    return error <= most and error <= STALE_PART * float(np.mean(errors[rest]))


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


def on_frames(reference: ReferenceOutput, code: tuple[str, ...]) -> tuple[str, ...]:
    """Return lines of numpy for (F, C) as lines for the output's shape."""
    axis = reference.frame_axis
    if not code or axis is None:
        return ()
    into = [f"x = np.moveaxis(x, {axis}, 0)", "moved = x.shape; x = x.reshape(len(x), -1)"]
    return (*into, *code, f"x = np.moveaxis(x.reshape(moved), 0, {axis})")


def moved_channels(expected: Expected, tensor: ExpectedTensor, geometry: Geometry) -> Expected:
    """Return the expected outputs with their channels in the order of a file."""

    def of(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        if tensor.name not in arrays or arrays[tensor.name].size != tensor.array.size:
            return {}
        output = ReferenceOutput.of(tensor, arrays[tensor.name], (), "")
        values = output.from_frames(output.frames[:, geometry.channel_map])
        return {tensor.name: values.reshape(tensor.array.shape)}

    def simulating(own: Simulate) -> Simulate:
        return lambda recipes: {name: of(arrays) for name, arrays in own(recipes).items()}

    return replace(
        expected,
        tensors=(replace(tensor, array=of({tensor.name: tensor.array})[tensor.name]),),
        make_alternatives=lambda: [
            replace(a, arrays=of(a.arrays), simulate=simulating(a.simulate))
            for a in expected.alternatives
        ],
        simulate=simulating(expected.simulate),
        known=of(expected.known),
    )


def channels_moved_back(explanation: Explanation, geometry: Geometry) -> Explanation:
    """Return an explanation of moved channels with the channels in the expected order."""
    reference = explanation.reference

    def back(array: Doubles) -> Doubles:
        return reference.from_frames(undone(geometry, reference.in_frames(array)))

    return replace(
        explanation,
        reference=replace(reference, array=back(reference.array)),
        findings=(*geometry.findings, *explanation.findings),
        code=(*explanation.code, *on_frames(reference, geometry.code)),
        corrected=back(explanation.corrected),
    )
