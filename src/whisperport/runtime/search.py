"""Choose the next token: the most probable one, a sampled one, or several in parallel as beams.

A search extends G candidates by one token at a time. Each candidate has its own cache.
Source: openai/whisper@v20250625, whisper/decoding.py:270-417.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from whisperport.runtime.cache import Floats

# The sum of 100,000 exponentials of at most this number is finite in float32, and that of one number of at
# least minus this number is far above the smallest float32.
SAFE_PEAK = 60
# 64 kB. After a step, a new array for a whole row would not be in a cache of the CPU: in pieces, the sum
# of 51,865 exponentials takes 0.7 of the time.
PIECE = 16384
BLOCK = 256  # logits that are reduced together; a row of 51,865 has about 200 blocks

TokenSampler = Callable[[Floats], Sequence[int]]
"""Sample one token from each row of logits (G, V), which are already divided by the temperature."""


@dataclass(slots=True)
class Candidate:
    """A beam or a sample: its tokens, without the prompt, and the sum of their log-probabilities."""

    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0  # natural logarithm
    ended: bool = False  # whether the end of text followed


class Search(Protocol):
    """Chooses the next tokens of all candidates."""

    width: int  # G, the number of candidates extended in parallel
    greedy: bool  # whether only the most probable token of a row is needed, and its probability

    def advance(
        self, candidates: list[Candidate], logits: list[Floats]
    ) -> tuple[list[Candidate], list[int], bool]:
        """Extend every candidate by one token.

        Args:
            candidates: G candidates.
            logits: G rows (V,), after the rules.

        Returns:
            The G candidates to continue, the index of the candidate that each continues, and whether
            the search is done.
        """
        ...

    def finish(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return the finished candidates, without the end of text."""
        ...


class Sampling:
    """Independent candidates: the most probable token at temperature 0, a sampled token above 0."""

    def __init__(
        self, end_of_text: int, temperature: float, width: int, sampler: TokenSampler
    ) -> None:
        self.width, self.greedy = width, temperature == 0
        self._end = end_of_text
        self._temperature = temperature
        self._sampler = sampler

    def advance(
        self, candidates: list[Candidate], logits: list[Floats]
    ) -> tuple[list[Candidate], list[int], bool]:
        if self._temperature == 0:
            tokens = [int(row.argmax()) for row in logits]
        else:
            rows = np.stack(logits)
            rows /= np.float32(self._temperature)
            tokens = list(self._sampler(rows))
        for candidate, row, token in zip(candidates, logits, tokens, strict=True):
            if self._ended(candidate):
                continue
            logit = row[token]
            peak = logit if self._temperature == 0 else None
            candidate.logprob += float(logit - log_sum_exp(row, peak))
            candidate.tokens.append(token)
        return (
            candidates,
            list(range(len(candidates))),
            all(self._ended(candidate) for candidate in candidates),
        )

    def finish(self, candidates: list[Candidate]) -> list[Candidate]:
        return [
            _ended_at(candidate.tokens, candidate.logprob, self._end) for candidate in candidates
        ]

    def _ended(self, candidate: Candidate) -> bool:
        return bool(candidate.tokens) and candidate.tokens[-1] == self._end


class Beams:
    """Beam search with patience (arXiv 2204.05424)."""

    def __init__(self, end_of_text: int, width: int, patience: float) -> None:
        self.width, self.greedy = width, False
        self._end = end_of_text
        self._wanted = round(width * patience)
        self._finished: dict[tuple[int, ...], float] = {}

    def advance(
        self, candidates: list[Candidate], logits: list[Floats]
    ) -> tuple[list[Candidate], list[int], bool]:
        scores: dict[tuple[int, ...], float] = {}
        sources: dict[tuple[int, ...], int] = {}
        for source, (candidate, row) in enumerate(zip(candidates, logits, strict=True)):
            total = log_sum_exp(row)
            for token in top(row, self.width + 1):
                extended = (*candidate.tokens, int(token))
                # float32 as in openai-whisper, so that the same sums tie.
                scores[extended] = float(np.float32(candidate.logprob) + (row[token] - total))
                sources[extended] = source

        unfinished: list[tuple[int, ...]] = []
        ended: dict[tuple[int, ...], float] = {}
        for tokens in sorted(scores, key=scores.__getitem__, reverse=True):
            if tokens[-1] == self._end:
                ended[tokens] = scores[tokens]
                continue
            unfinished.append(tokens)
            if len(unfinished) == self.width:
                break
        for tokens, score in ended.items():  # in the order of their scores
            if len(self._finished) >= self._wanted:
                break
            self._finished[tokens] = score
        beams = [Candidate(list(tokens), scores[tokens]) for tokens in unfinished]
        done = len(self._finished) >= self._wanted
        return beams, [sources[tokens] for tokens in unfinished], done

    def finish(self, candidates: list[Candidate]) -> list[Candidate]:
        finished = [_ended_at(tokens, score, self._end) for tokens, score in self._finished.items()]
        missing = max(0, self.width - len(finished))  # filled with the best unfinished ones
        by_score = sorted(candidates, key=lambda candidate: candidate.logprob, reverse=True)
        return finished + [_ended_at(p.tokens, p.logprob, self._end) for p in by_score[:missing]]


def best_candidate(candidates: Sequence[Candidate], length_penalty: float | None) -> Candidate:
    """Return the candidate with the highest log-probability for its length.

    Args:
        candidates: at least one.
        length_penalty: exponent α of Google NMT's formula, 0 to 1; None: divide by the length.
    """

    def score(candidate: Candidate) -> float:
        length = len(candidate.tokens)
        if length_penalty is not None:
            return candidate.logprob / float(((5 + length) / 6) ** length_penalty)
        return candidate.logprob / length if length else -np.inf

    return max(candidates, key=score)


def log_sum_exp(row: Floats, peak: np.float32 | None = None) -> np.float32:
    """Return the natural logarithm of the sum of the exponentials of a row (V,).

    Args:
        row: any numbers.
        peak: the largest of them, if it is known.
    """
    if peak is None:
        peak = row[row.argmax()]  # twice as fast as `max`
    # Subtracting the largest number is needed only where the sum could be infinite or 0.
    shift = 0.0 if abs(peak) < SAFE_PEAK else float(peak)
    total = 0.0
    for start in range(0, row.size, PIECE):
        piece = row[start : start + PIECE]
        total += float(np.add.reduce(np.exp(piece - shift if shift else piece)))
    return np.float32(shift + math.log(total))


def top(row: Floats, count: int) -> NDArray[np.int64]:
    """Return the indices of the `count` largest values of (V,), largest first; ties by index."""
    peaks = np.maximum.reduceat(row, np.arange(0, row.size, BLOCK))
    # The maxima of `count` blocks reach the floor, so the largest values are among those that reach it.
    # This is 20 times faster than partitioning the row. `~(row < floor)` keeps NaN values.
    floor = np.partition(peaks, -count)[-count] if peaks.size >= count else -np.inf
    found = np.flatnonzero(~(row < floor))
    return found[np.argsort(-row[found], kind="stable")[:count]]


def _ended_at(tokens: Sequence[int], logprob: float, end: int) -> Candidate:
    """Return a candidate with the tokens before the end of text, and whether there was one."""
    if end in tokens:
        return Candidate(list(tokens[: tokens.index(end)]), logprob, ended=True)
    return Candidate(list(tokens), logprob)


def numpy_sampler(generator: np.random.Generator) -> TokenSampler:
    """Return a sampler that uses a numpy generator, with one random number per row."""

    def sampler(logits: Floats) -> list[int]:
        return [_sampled(row, generator.random()) for row in logits]

    return sampler


def _sampled(row: Floats, uniform: float) -> int:
    """Return the token at `uniform`, 0 to 1, of the cumulative distribution of a row (V,)."""
    weights = row - row.max()
    np.exp(weights, out=weights)
    sums = np.add.reduceat(weights, np.arange(0, row.size, BLOCK))
    block, rest = _index_at(sums, uniform * sums.sum())
    token, _ = _index_at(weights[block * BLOCK : (block + 1) * BLOCK], rest)
    return block * BLOCK + token


def _index_at(weights: NDArray[Any], at: float) -> tuple[int, float]:
    """Return the index whose cumulative range contains `at`, and the offset in it; its weight is not 0."""
    ends = np.cumsum(weights, dtype=np.float64)
    last = np.searchsorted(ends, ends[-1])  # if rounding puts `at` after all of them
    found = int(min(np.searchsorted(ends, at, side="right"), last))
    return found, at - float(ends[found] - weights[found])
