"""Search for the simplest explanation of a file, over all combinations of readings, layouts and references.

1. The file's size decides which readings and layouts are possible.
2. Each is compared with each reference on a sample of frames (`similarity.py`).
3. The most similar ones are fitted completely (`explaining.py`). Each cause costs 6 dB: it must halve the
   error. The cheapest explanation wins.
4. Wrong sizes are considered if no right size explains the file, and wrong inputs if nothing else does.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from whisperport.diagnosis.candidates import (
    Candidate,
    exact_candidates,
    inexact_candidates,
    with_other_signedness,
)
from whisperport.diagnosis.causes import CauseCode
from whisperport.diagnosis.expected import Alternative, Expected, ExpectedTensor
from whisperport.diagnosis.explaining import explain
from whisperport.diagnosis.explanation import Explanation, Hypothesis
from whisperport.diagnosis.noise import is_noise
from whisperport.diagnosis.raw_files import RawOutput
from whisperport.diagnosis.reference_outputs import (
    ReferenceOutput,
    of_alternative,
    of_both,
    of_expected,
    of_other_output,
)
from whisperport.diagnosis.scales import PER_CAUSE_DB, SMALLEST
from whisperport.diagnosis.similarity import scored

FITTED = 5  # hypotheses that are fitted in each round
SMALL = 8192  # values of an output; all that may be right is fitted to a smaller one
FITTED_IF_SMALL = 30
PAIRS_AT_ONCE = 12  # inputs with two mistakes whose outputs are held in memory
LEADING = 3  # mistakes with the input that are combined with every other one
KEPT = 8  # readings with layouts that are compared with the outputs for wrong inputs
LEAST = 0.1  # similarity below which a hypothesis is not fitted
LEAST_OF_PAIRS = 0.65  # to any wrong input, if two mistakes are tried: these have at least 0.7


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """The result of a search.

    Attributes:
        best: the cheapest explanation; None if there is no hypothesis at all.
        tried: what was tried, one sentence each.
    """

    best: Explanation | None
    tried: tuple[str, ...]


def search(raw: RawOutput, tensor: ExpectedTensor, expected: Expected, tolerance: float) -> Search:
    """Find the simplest explanation of a file.

    Args:
        raw: the file.
        tensor: the output that it is expected to hold.
        expected: the outputs of the program, and those of wrong inputs.
        tolerance: mean square error in parts of the expected mean square that needs no explanation.
    """
    tried: list[str] = []
    references = [of_expected(tensor), *_other_outputs(tensor, expected)]
    exact = list(exact_candidates(raw, tensor, references))
    best = _best_of(exact, references, references, None)
    tried.append(_described(exact, references))
    if _is_done(best, tolerance):
        return Search(best, tuple(tried))
    halves = list(with_other_signedness(exact))
    best = _best_of(halves, references, references, best)
    if _is_done(best, tolerance):
        return Search(best, tuple(tried))
    inexact = list(inexact_candidates(raw, tensor, references))
    inexact += with_other_signedness([c for c in inexact if c.reading.step])
    best = _best_of(inexact, references, references, best)
    if inexact:
        tried.append(_described(inexact, references))
    if _is_done(best, tolerance):
        return Search(best, tuple(tried))
    wrong = list(_wrong(tensor, expected))
    if not wrong:
        return Search(best, tuple(tried))
    # A stale part is what another run left: the output for the right input of any clip.
    right = [*references, *(r for r in wrong if _is_right(r))]
    best = _again(best, right)
    likely = _likely(exact + halves, inexact, references)
    best = _best_of(likely, references, right, best, thorough=False)
    best = _best_of(likely, wrong, right, best)
    tried += [f"Not the output for another input: {r.findings[0].sentence}" for r in wrong]
    best = _with_known_part(best, wrong, right)
    if not _is_settled(best, tensor, expected, tolerance):
        best = _with_two_mistakes(likely, right, tensor, expected, best)
        tried.append("Not the output for an input with two of these mistakes, of the likely ones.")
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
    candidates: Sequence[Candidate],
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


def likely_pairs(ranked: Sequence[Alternative]) -> Iterator[tuple[Alternative, Alternative]]:
    """Yield pairs of mistakes that one input can have, the most likely first.

    The output for an input with two mistakes is most similar to that for the mistake that changes the input
    most. So the leading mistakes are combined with all others. A transposed spectrogram and one of silence
    are similar to nothing, whatever else is wrong; they are combined with all others, too. Neither mistake
    may lead if another window of another clip was given, so that all of these pairs follow.

    Each pair costs a run of the encoder.

    Args:
        ranked: the mistakes, those whose output is most similar to the file first.
    """
    leading = [*ranked[:LEADING], *filter(_is_similar_to_nothing, ranked)]
    done: list[Alternative] = []
    for first in dict.fromkeys(leading):
        done.append(first)
        for second in ranked:
            if second not in done and not first.excludes(second):
                yield first, second
    windows = [a for a in ranked if a.cause is CauseCode.OTHER_WINDOW and a not in done]
    for clip in (a for a in ranked if a.clip and a not in done):
        yield from ((clip, window) for window in windows)


def _is_similar_to_nothing(alternative: Alternative) -> bool:
    """Return whether another mistake changes the output completely."""
    if alternative.cause is CauseCode.SILENT_INPUT:
        return alternative.mistake is not None and alternative.mistake.is_of_samples
    return alternative.cause is CauseCode.MEL_TRANSPOSED


def _ranked(
    candidates: Sequence[Candidate], tensor: ExpectedTensor, expected: Expected
) -> list[tuple[float, Alternative]]:
    """Return the wrong inputs with their output's similarity to the file, the most similar first."""
    scores = []
    for alternative in expected.alternatives:
        reference = of_alternative(tensor, alternative)
        if reference is not None:
            similar = [s for s, _, _ in scored(candidates, [reference])]
            scores.append((max(similar, default=0.0), alternative))
    return sorted(scores, key=lambda pair: -pair[0])


def _is_done(best: Explanation | None, tolerance: float) -> bool:
    return (
        best is not None
        and best.is_complete(tolerance)
        and CauseCode.STALE_BUFFER not in {finding.cause for finding in best.findings}
    )


def _likely(
    exact: Sequence[Candidate],
    inexact: Sequence[Candidate],
    references: Sequence[ReferenceOutput],
) -> list[Candidate]:
    """Return the candidates that are compared with the outputs for wrong inputs.

    They are the most similar ones, and always the usual layout: no output is similar to that of silence.
    """
    plain = [candidate for candidate in exact if not candidate.layout.findings]
    found = dict.fromkeys(plain)
    for candidates in (exact, inexact):
        pairs = heapq.nlargest(KEPT, scored(candidates, references), key=lambda pair: pair[0])
        found |= dict.fromkeys(candidate for _, candidate, _ in pairs)
    return list(found)


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


def _best_of(
    candidates: Sequence[Candidate],
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
    pairs = heapq.nlargest(count, scored(candidates, references), key=lambda pair: pair[0])
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


def _cheapest_db(candidate: Candidate, reference: ReferenceOutput) -> float:
    """Return the lowest cost that an explanation can have: no error, and the causes that are certain."""
    causes = candidate.causes + len(reference.findings)
    return 10 * math.log10(SMALLEST) + PER_CAUSE_DB * causes


def _described(candidates: Sequence[Candidate], references: Sequence[ReferenceOutput]) -> str:
    dtypes = ", ".join(dict.fromkeys(candidate.reading.dtype for candidate in candidates))
    layouts = len({(c.layout.order, c.layout.padded, c.layout.split) for c in candidates})
    return (
        f"Not the values as {dtypes or 'any dtype'}, in {layouts} layouts, as any of "
        f"{len(references)} outputs, with any scale, offset or shift."
    )
