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

from whisperport.verification.diagnosis.candidates import (
    Candidate,
    exact_candidates,
    inexact_candidates,
)
from whisperport.verification.diagnosis.causes import CauseCode
from whisperport.verification.diagnosis.expected import Expected, ExpectedTensor
from whisperport.verification.diagnosis.explaining import Explanation, explain
from whisperport.verification.diagnosis.raw_files import RawOutput
from whisperport.verification.diagnosis.reference_outputs import (
    ReferenceOutput,
    of_alternative,
    of_expected,
    of_other_output,
)
from whisperport.verification.diagnosis.scales import PER_CAUSE_DB, SMALLEST
from whisperport.verification.diagnosis.similarity import scored

FITTED = 5  # hypotheses that are fitted in each round
SMALL = 8192  # values of an output; all that may be right is fitted to a smaller one
FITTED_IF_SMALL = 30
KEPT = 8  # readings with layouts that are compared with the outputs for wrong inputs
LEAST = 0.1  # similarity below which a hypothesis is not fitted


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """The result of a search.

    Attributes:
        best: the cheapest explanation; None if there is no hypothesis at all.
        tried: what was tried, one sentence each.
        candidates: the most similar readings and layouts, if nothing explains the file completely.
    """

    best: Explanation | None
    tried: tuple[str, ...]
    candidates: tuple[Candidate, ...] = ()


def search(raw: RawOutput, tensor: ExpectedTensor, expected: Expected) -> Search:
    """Find the simplest explanation of a file.

    Args:
        raw: the file.
        tensor: the output that it is expected to hold.
        expected: the outputs of the program, and those of wrong inputs.
    """
    references = [of_expected(tensor), *_other_outputs(tensor, expected)]
    exact = list(exact_candidates(raw, tensor, references))
    tried = [_described(exact, references)]
    best = _best_of(exact, references, references, None)
    if _is_done(best):
        return Search(best, tuple(tried))
    inexact = list(inexact_candidates(raw, tensor, references))
    best = _best_of(inexact, references, references, best)
    if inexact:
        tried.append(_described(inexact, references))
    if _is_done(best):
        return Search(best, tuple(tried))
    candidates = _likely(exact, inexact, references)
    wrong = list(_wrong(tensor, expected))
    if wrong:
        # A stale part is what another run left: the output for the right input of any clip.
        right = [*references, *(r for r in wrong if _is_right(r))]
        best = _again(best, right)
        best = _best_of(candidates, references, right, best, thorough=False)
        best = _best_of(candidates, wrong, right, best)
        tried += [f"Not the output for another input: {r.findings[0].sentence}" for r in wrong]
    return Search(best, tuple(tried), tuple(candidates))


def _is_right(reference: ReferenceOutput) -> bool:
    """Return whether it is an output for the right input of some clip."""
    wrong = {finding.cause for finding in reference.findings}
    return wrong <= {CauseCode.OTHER_CLIP, CauseCode.OUTPUTS_SWAPPED}


def _is_done(best: Explanation | None) -> bool:
    return best is not None and best.is_complete and CauseCode.STALE_BUFFER not in best.causes


def _likely(
    exact: Sequence[Candidate],
    inexact: Sequence[Candidate],
    references: Sequence[ReferenceOutput],
) -> list[Candidate]:
    """Return the candidates that are compared with the outputs for wrong inputs.

    They are the most similar ones, and always the usual layout: no output is similar to that of silence.
    """
    kept = dict.fromkeys(candidate for candidate in exact if candidate.is_plain)
    for candidates in (exact, inexact):
        pairs = heapq.nlargest(KEPT, scored(candidates, references), key=lambda pair: pair[0])
        kept |= dict.fromkeys(candidate for _, candidate, _ in pairs)
    return list(kept)


def _again(
    best: Explanation | None, stale_outputs: Sequence[ReferenceOutput]
) -> Explanation | None:
    """Fit the best hypothesis again: a part of the file may hold the output for another input."""
    if best is None:
        return None
    again = explain(best.candidate, best.reference, stale_outputs)
    return again if again and again.cost_db <= best.cost_db + 1e-9 else best


def _wrong(tensor: ExpectedTensor, expected: Expected) -> Iterator[ReferenceOutput]:
    """Yield the outputs for other inputs, and other outputs for other clips."""
    for alternative in expected.alternatives:
        if output := of_alternative(tensor, alternative):
            yield output
        if alternative.cause is not CauseCode.OTHER_CLIP:
            continue
        for swapped in _other_outputs(tensor, expected):
            if output := of_alternative(expected.tensor(swapped.name), alternative):
                yield replace(output, findings=(*output.findings, *swapped.findings))


def _other_outputs(tensor: ExpectedTensor, expected: Expected) -> list[ReferenceOutput]:
    return [
        of_other_output(output, tensor.name)
        for output in expected.tensors
        if output.name != tensor.name and output.array.size == tensor.array.size
    ]


def _best_of(
    candidates: Sequence[Candidate],
    references: Sequence[ReferenceOutput],
    stale_outputs: Sequence[ReferenceOutput],
    best: Explanation | None,
    *,
    thorough: bool = True,
) -> Explanation | None:
    """Fit the most similar pairs of a candidate and a reference; return the cheapest explanation.

    Args:
        candidates: readings with layouts.
        references: outputs that the file may hold.
        stale_outputs: outputs that a stale part of the file may hold.
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
                fits = c.is_plain and c.layout.shape == reference.array.shape
                if fits and (id(c), id(reference)) not in chosen:
                    pairs.append((LEAST, c, reference))
    for similarity, candidate, reference in pairs:
        if best is not None and (
            (similarity < LEAST and not small)
            or _cheapest_db(candidate, reference) >= best.cost_db - 1e-9
        ):
            continue
        explanation = explain(candidate, reference, stale_outputs)
        if explanation and (best is None or explanation.cost_db < best.cost_db - 1e-9):
            best = explanation
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
