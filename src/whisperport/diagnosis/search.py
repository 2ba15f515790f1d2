"""Search for the simplest explanation of a file, over all combinations of readings, layouts and references.

1. The file's size decides which readings and layouts are possible.
2. Each is compared with each reference on a sample of frames, by numbers that a scale and an offset do not
   change, nor a shift: the correlation of the values, of the channels' means, of the frames' deviations.
3. The most similar ones are fitted completely (`fitting.py`). Each cause costs 6 dB: it must halve the
   error. The cheapest explanation wins.
4. Wrong sizes are considered if no right size explains the file, and wrong inputs if nothing else does.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from whisperport.diagnosis.buffers import constant_run
from whisperport.diagnosis.causes import CauseCode
from whisperport.diagnosis.expected import Alternative, Expected, ExpectedTensor
from whisperport.diagnosis.fitting import Explanation, Hypothesis, explain
from whisperport.diagnosis.frames import REPEATS
from whisperport.diagnosis.input_pairs import likely_pairs
from whisperport.diagnosis.layouts import Layout, common_layouts, layouts_of
from whisperport.diagnosis.noise import is_noise
from whisperport.diagnosis.raw_files import RawOutput
from whisperport.diagnosis.readings import FORMATS, Floats, Reading, readings
from whisperport.diagnosis.reference_outputs import (
    ReferenceOutput,
    of_alternative,
    of_both,
    of_expected,
    of_other_output,
)
from whisperport.diagnosis.result import Finding
from whisperport.diagnosis.scales import PER_CAUSE_DB, SMALLEST
from whisperport.diagnosis.signedness import other_signedness

Doubles = NDArray[np.float64]

FITTED = 5  # hypotheses that are fitted in each round
SMALL = 8192  # values of an output; all that may be right is fitted to a smaller one
FITTED_IF_SMALL = 30
PAIRS_AT_ONCE = 12  # inputs with two mistakes whose outputs are held in memory
KEPT = 8  # readings with layouts that are compared with the outputs for wrong inputs
SAMPLED = 40_000  # values that are compared in step 2
COARSE = 4  # every so many sampled frames are compared with repeated ones
SIMPLER = 0.01  # of two equally similar hypotheses, that with fewer causes is fitted first
LEAST = 0.1  # similarity below which a hypothesis is not fitted
LEAST_OF_PAIRS = 0.65  # to any wrong input, if two mistakes are tried: these have at least 0.7
LONGEST_EXTRA = 0.5  # part of the output's size that may precede or follow it
SMALLEST_PART = 0.02  # part of the output that a truncated file must hold


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """The result of a search.

    Attributes:
        best: the cheapest explanation; None if there is no hypothesis at all.
        tried: what was tried, one sentence each.
    """

    best: Explanation | None
    tried: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Candidate:
    """A reading with a layout, and its sampled values."""

    reading: Reading
    layout: Layout
    findings: tuple[Finding, ...] = ()
    code: tuple[str, ...] = ()
    samples: dict[tuple[int | None, tuple[int, ...]], Doubles] = field(default_factory=dict)

    @property
    def causes(self) -> int:
        """Number of causes that it stands for."""
        return len(self.findings) + len(self.reading.findings) + len(self.layout.findings)


def search(raw: RawOutput, tensor: ExpectedTensor, expected: Expected, tolerance: float) -> Search:
    """Find the simplest explanation of a file.

    Args:
        raw: the file.
        tensor: the output that it is expected to hold.
        expected: the outputs of the program, and those of wrong inputs.
        tolerance: mean square error in parts of the expected mean square that needs no explanation.
    """
    tried: list[str] = []
    own = of_expected(tensor)
    references = [own, *_other_outputs(tensor, expected)]
    exact = list(_exact(raw, tensor, references))
    best = _best_of(exact, references, references, None)
    tried.append(_described(exact, references))
    if _is_done(best, tolerance):
        return Search(best, tuple(tried))
    halves = list(_with_other_signedness(exact))
    best = _best_of(halves, references, references, best)
    if _is_done(best, tolerance):
        return Search(best, tuple(tried))
    exact += halves
    inexact = list(_inexact(raw, tensor, references))
    inexact += _with_other_signedness([c for c in inexact if c.reading.step])
    best = _best_of(inexact, references, references, best)
    if inexact:
        tried.append(_described(inexact, references))
    if _is_done(best, tolerance):
        return Search(best, tuple(tried))
    wrong = list(_wrong(tensor, expected))
    if wrong:
        # A stale part is what another run left: the output for the right input of any clip.
        right = [*references, *(r for r in wrong if _is_right(r))]
        best = _again(best, right)
        # The output of silence is similar to no reference, so the usual layout is always compared.
        plain = [candidate for candidate in exact if not candidate.layout.findings]
        likely = [*plain, *_likely(exact, references), *_likely(inexact, references)]
        likely = list(dict.fromkeys(likely))
        best = _best_of(likely, references, right, best, thorough=False)
        best = _best_of(likely, wrong, right, best)
        tried += [f"Not the output for another input: {r.findings[0].sentence}" for r in wrong]
        best = _with_known_part(best, wrong, right)
        if not _is_settled(best, tensor, expected, tolerance):
            best = _with_two_mistakes(likely, right, tensor, expected, best)
            tried.append(
                "Not the output for an input with two of these mistakes, of the likely ones."
            )
    return Search(best, tuple(tried))


def _is_right(reference: ReferenceOutput) -> bool:
    """Return whether it is an output for the right input of some clip."""
    wrong = {finding.cause for finding in reference.findings}
    return wrong <= {CauseCode.OTHER_CLIP, CauseCode.OUTPUTS_SWAPPED}


def _is_settled(
    best: Explanation | None, tensor: ExpectedTensor, expected: Expected, tolerance: float
) -> bool:
    """Return whether no second mistake with the input is needed.

    It is if the explanation is complete, or if the rest is noise on an output for the right input. A part
    that belongs to another output is no noise.
    """
    if best is None or best.is_complete(tolerance):
        return best is not None
    if any(finding.cause is CauseCode.STALE_BUFFER for finding in best.findings):
        return False
    return not best.hypothesis.reference.findings and is_noise(best, tensor, expected)


def _with_two_mistakes(
    candidates: Sequence[_Candidate],
    references: Sequence[ReferenceOutput],
    tensor: ExpectedTensor,
    expected: Expected,
    best: Explanation | None,
) -> Explanation | None:
    """Fit the outputs for inputs with two mistakes, until one of them explains the file completely."""
    ranked = _ranked(candidates, tensor, expected)
    if not ranked or ranked[0][0] < LEAST_OF_PAIRS:
        return best
    pairs = likely_pairs([alternative for _, alternative in ranked])
    while batch := list(islice(pairs, PAIRS_AT_ONCE)):
        found = []
        for first, second in batch:
            arrays = expected.make_both(first, second)
            reference = arrays and of_both(tensor, arrays, first, second)
            if reference:
                found.append(reference)
        best = _best_of(candidates, found, references, best, thorough=False)
        if best is not None and best.is_complete(SMALLEST):
            break
    return best


def _ranked(
    candidates: Sequence[_Candidate], tensor: ExpectedTensor, expected: Expected
) -> list[tuple[float, Alternative]]:
    """Return the wrong inputs with their output's similarity to the file, the most similar first."""
    scores = []
    for alternative in expected.alternatives:
        reference = of_alternative(tensor, alternative)
        if reference is not None:
            similar = [s for s, _, _ in _scored(candidates, [reference])]
            scores.append((max(similar, default=0.0), alternative))
    return sorted(scores, key=lambda pair: -pair[0])


def _is_done(best: Explanation | None, tolerance: float) -> bool:
    return (
        best is not None
        and best.is_complete(tolerance)
        and CauseCode.STALE_BUFFER not in {finding.cause for finding in best.findings}
    )


def _likely(
    candidates: Sequence[_Candidate], references: Sequence[ReferenceOutput]
) -> list[_Candidate]:
    """Return the candidates that are most similar to any reference."""
    pairs = heapq.nlargest(KEPT, _scored(candidates, references), key=lambda pair: pair[0])
    return list(dict.fromkeys(candidate for _, candidate, _ in pairs))


def _again(best: Explanation | None, others: Sequence[ReferenceOutput]) -> Explanation | None:
    """Fit the best hypothesis again: a part of the file may hold the output for another input."""
    if best is None:
        return None
    reference = best.hypothesis.reference
    same = [o for o in others if o is not reference and o.array.shape == reference.array.shape]
    again = explain(best.hypothesis, same)
    return again if again and again.cost_db <= best.cost_db + 1e-9 else best


def _with_known_part(
    best: Explanation | None,
    wrong: Sequence[ReferenceOutput],
    right: Sequence[ReferenceOutput],
) -> Explanation | None:
    """Find out what a part of a file holds that belongs to no output for the right input.

    What was found may be the stale part, and this the output for a wrong input. The larger part decides how
    similar a file is to an output, so that similarity does not find the smaller one.
    """
    if best is None or not best.has_unknown_part:
        return best
    for reference in wrong:
        if reference.array.shape != best.hypothesis.layout.shape:
            continue
        found = explain(
            replace(best.hypothesis, reference=reference),
            [r for r in right if r is not reference and r.array.shape == reference.array.shape],
        )
        if found and found.cost_db < best.cost_db - 1e-9:
            best = found
    return best


def _wrong(tensor: ExpectedTensor, expected: Expected) -> Iterator[ReferenceOutput]:
    """Yield the outputs for other inputs, and other outputs for other clips."""
    for alternative in expected.alternatives:
        if found := of_alternative(tensor, alternative):
            yield found
        if alternative.cause is not CauseCode.OTHER_CLIP:
            continue
        for swapped in _other_outputs(tensor, expected):
            if found := of_alternative(expected.tensor(swapped.name), alternative):
                yield replace(found, findings=(*found.findings, *swapped.findings))


def _other_outputs(tensor: ExpectedTensor, expected: Expected) -> list[ReferenceOutput]:
    return [
        of_other_output(other, tensor.name)
        for other in expected.tensors
        if other.name != tensor.name and other.array.size == tensor.array.size
    ]


def _exact(
    raw: RawOutput, tensor: ExpectedTensor, references: Sequence[ReferenceOutput]
) -> Iterator[_Candidate]:
    """Yield the readings and layouts that fill the file exactly."""
    shapes = list(dict.fromkeys(reference.array.shape for reference in references))
    for reading in readings(raw, tensor.array.size, tensor.quantization):
        for shape in shapes:
            for layout in layouts_of(shape, reading.values.size):
                yield _Candidate(reading, layout)


def _with_other_signedness(candidates: Sequence[_Candidate]) -> Iterator[_Candidate]:
    """Yield the candidates whose integers may have been read with the other signedness."""
    found: dict[Reading, tuple[Reading, ...]] = {}
    for candidate in candidates:
        if candidate.reading not in found:
            found[candidate.reading] = tuple(other_signedness(candidate.reading))
        for reading in found[candidate.reading]:
            yield replace(candidate, reading=reading, samples={})


def _inexact(
    raw: RawOutput, tensor: ExpectedTensor, references: Sequence[ReferenceOutput]
) -> Iterator[_Candidate]:
    """Yield the readings and layouts of a file that is too short, or has bytes that are no values."""
    shapes = dict.fromkeys(reference.array.shape for reference in references)
    layouts = [layout for shape in shapes for layout in common_layouts(shape)]
    for reading in readings(raw, tensor.array.size, tensor.quantization):
        if reading.values.size == tensor.array.size:
            continue  # the file has its full size
        for layout in layouts:
            if SMALLEST_PART * layout.size <= reading.values.size < layout.size:
                finding = _truncated(reading, layout)
                yield _Candidate(reading, layout, (finding,), _padding_code(layout))
    sizes = {layout.size for layout in layouts}
    itemsizes = {form.itemsize for form in FORMATS}
    itemsizes |= {4 * k for k in itemsizes}  # each byte of a value became a float32
    for size in sorted({n * k for n in sizes for k in itemsizes}):
        extra = raw.data.size - size
        if 0 < extra <= max(4096, LONGEST_EXTRA * size):
            yield from _with_extra(raw, tensor, layouts, size, extra)


def _with_extra(
    raw: RawOutput,
    tensor: ExpectedTensor,
    layouts: Sequence[Layout],
    size: int,
    extra: int,
) -> Iterator[_Candidate]:
    for start in (0, extra):
        part = RawOutput(raw.source, raw.data[start : start + size])
        finding = _extra_finding(start, extra)
        code = (f"path = cut(path, {start}, {start + size})",)
        for reading in readings(part, tensor.array.size, tensor.quantization):
            for layout in layouts:
                if layout.size == reading.values.size:
                    yield _Candidate(reading, layout, (finding,), code)


def _truncated(reading: Reading, layout: Layout) -> Finding:
    return Finding(
        cause=CauseCode.TRUNCATED,
        sentence=f"The file holds {reading.values.size:,} of {layout.size:,} values: it ends early.",
        advice="Copy the complete file; check the free space of the device's disk.",
    )


def _padding_code(layout: Layout) -> tuple[str, ...]:
    return (f"size = {layout.size}  # the missing values become NaN",)


def _extra_finding(start: int, extra: int) -> Finding:
    side = "before" if start else "after"
    return Finding(
        cause=CauseCode.EXTRA_BYTES,
        sentence=f"The file holds {extra:,} bytes {side} the values that belong to no value.",
        advice="Skip these bytes, or write the output without a header.",
    )


def _best_of(
    candidates: Sequence[_Candidate],
    references: Sequence[ReferenceOutput],
    others: Sequence[ReferenceOutput],
    best: Explanation | None,
    *,
    thorough: bool = True,
) -> Explanation | None:
    """Fit the most similar pairs of a candidate and a reference; return the cheapest explanation.

    Args:
        candidates: readings with layouts.
        references: outputs that the file may hold.
        others: outputs that a stale part of the file may hold.
        best: the cheapest explanation so far.
        thorough: fit more pairs if the output is small, since similarity says little about few values.
    """
    small = thorough and bool(references) and references[0].array.size < SMALL
    count = FITTED_IF_SMALL if small else FITTED
    pairs = heapq.nlargest(count, _scored(candidates, references), key=lambda pair: pair[0])
    if thorough:  # blocks and frames in another order leave no similarity
        chosen = {(id(candidate), id(reference)) for _, candidate, reference in pairs}
        for reference in references if small else references[:1]:
            for c in candidates:
                usual = not (c.layout.findings or c.findings)
                fits = usual and c.layout.shape == reference.array.shape
                if fits and (id(c), id(reference)) not in chosen:
                    pairs.append((LEAST, c, reference))
    for similarity, candidate, reference in pairs:
        if best is not None and (
            (similarity < LEAST and not small)
            or _cheapest_db(candidate, reference) >= best.cost_db - 1e-9
        ):
            continue
        hypothesis = Hypothesis(
            candidate.reading, candidate.layout, reference, candidate.findings, candidate.code
        )
        same = [o for o in others if o is not reference and o.array.shape == reference.array.shape]
        found = explain(hypothesis, same)
        if found and (best is None or found.cost_db < best.cost_db - 1e-9):
            best = found
    return best


def _cheapest_db(candidate: _Candidate, reference: ReferenceOutput) -> float:
    """Return the lowest cost that an explanation can have: no error, and the causes that are certain."""
    causes = candidate.causes + len(reference.findings)
    return 10 * math.log10(SMALLEST) + PER_CAUSE_DB * causes


def _scored(
    candidates: Iterable[_Candidate], references: Sequence[ReferenceOutput]
) -> Iterator[tuple[float, _Candidate, ReferenceOutput]]:
    for candidate in candidates:
        for reference in references:
            if reference.array.shape == candidate.layout.shape:
                yield _similarity(candidate, reference), candidate, reference


@np.errstate(invalid="ignore", over="ignore")
def _similarity(candidate: _Candidate, reference: ReferenceOutput) -> float:
    """Return how similar a reading in a layout is to a reference, 0 to 1."""
    r = reference.frames
    index = _sampled_frames(*r.shape)
    key = (reference.frame_axis, reference.array.shape)
    if key not in candidate.samples:
        candidate.samples[key] = _robust(_sample(candidate, reference, index))
    x = candidate.samples[key]
    known = np.isfinite(x)
    if np.count_nonzero(known) < 8:
        return 0.0
    scores = [_correlation(x[known], r[index][known])]
    if r.shape[0] >= 8 and r.shape[1] >= 8:
        x0, r0 = np.where(known, x, 0), np.where(known, r[index], 0)
        columns, rows = known.any(axis=0), known.any(axis=1)
        scores.append(_correlation(x0.sum(0)[columns], r0.sum(0)[columns]))
        scores.append(0.8 * _correlation(x0.std(1)[rows], r0.std(1)[rows]))
        if candidate.causes < 2:
            few = np.arange(0, index.size, COARSE)
            for n in REPEATS:
                scores.append(_correlation(x[few][known[few]], r[index[few] // n][known[few]]))
    return max(scores) - SIMPLER * candidate.causes


def _sampled_frames(frames: int, channels: int) -> NDArray[np.int64]:
    count = min(frames, max(32, SAMPLED // channels))
    return np.unique(np.linspace(0, frames - 1, count).astype(np.int64))


def _sample(candidate: _Candidate, reference: ReferenceOutput, index: NDArray[np.int64]) -> Doubles:
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


def _described(candidates: Sequence[_Candidate], references: Sequence[ReferenceOutput]) -> str:
    dtypes = ", ".join(dict.fromkeys(candidate.reading.dtype for candidate in candidates))
    layouts = len({(c.layout.order, c.layout.padded, c.layout.split) for c in candidates})
    return (
        f"Not the values as {dtypes or 'any dtype'}, in {layouts} layouts, as any of "
        f"{len(references)} outputs, with any scale, offset or shift."
    )
