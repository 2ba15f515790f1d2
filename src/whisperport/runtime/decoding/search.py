"""Choose the next token: the most probable one, a sampled one, or several in parallel as beams.

A search extends G candidates by one token at a time. Each candidate has its own cache.
Source: openai/whisper@v20250625, whisper/decoding.py:270-417.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from whisperport.program.generation import Generation
from whisperport.runtime.engine.scores import Floats, LogSum, Scores

LEAST_BONUS = 1e-3  # nats; what is below is what remains of rounding
IMPOSSIBLE = 1000.0  # nats: the score of a sentence that was cut off, or that no token spells
BLOCK = 256  # logits that are reduced together; a row of 51,865 has about 200 blocks

TokenSampler = Callable[[Floats], Sequence[int]]
"""Sample one token from each row of logits (G, V), which are already divided by the temperature."""

Extended = tuple["Candidate", int]
"""A candidate with one more token, and the index of the candidate that it continues."""


class Verdict(NamedTuple):
    """Whether speech is a sentence of the grammar."""

    end: int  # number of tokens up to the end of the sentence
    matched: bool
    score: float  # nats by which the model would rather have written something else


@dataclass(slots=True)
class Candidate:
    """A beam or a sample: its tokens, without the prompt, and the sum of their log-probabilities.

    Before `finish`, `Sampling` has logits in place of log-probabilities.
    """

    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0  # natural logarithm
    ended: bool = False  # whether the end of text followed
    logprobs: list[float] = field(default_factory=list)  # of each token
    bonus: float = 0.0  # of phrases, in nats; not a part of `logprob`
    pending: float = 0.0  # of the bonus: what is given back if the last phrase does not go on
    opens: bool = False  # whether a phrase may become complete
    # With a grammar:
    is_own: bool = True  # whether its sentence is what the model would write without the grammar
    is_free: bool = False  # whether its sentence has left the grammar
    waits: bool = False  # whether its sentence has ended before others, so that it needs no step
    gap: float = 0.0  # nats by which the model would rather have written another sentence
    verdicts: tuple["Verdict", ...] = ()  # about its sentences

    @property
    def score(self) -> float:
        """By which texts are compared."""
        return self.logprob + self.bonus - self.pending

    @property
    def prospect(self) -> float:
        """The score if the last phrase becomes complete, by which beginnings are compared."""
        return self.logprob + self.bonus

    @property
    def has_phrase(self) -> bool:
        """Whether it has a phrase, or the beginning of one."""
        return self.bonus > LEAST_BONUS

    def extended(self, token: int, logprob: float, scores: Scores) -> "Candidate":
        """Return a candidate with one more token, of this log-probability, and its bonus."""
        gain, pending, opens = scores.bonus_of(token)
        return Candidate(
            [*self.tokens, token],
            self.logprob + logprob,
            logprobs=[*self.logprobs, logprob],
            bonus=self.bonus + gain,
            pending=pending,
            opens=opens,
        )


class Search(Protocol):
    """Chooses the next tokens of all candidates."""

    width: int  # the number of candidates at the start
    greedy: bool  # whether only the most probable token of a row is needed, and its probability

    def advance(
        self, candidates: list[Candidate], scores: list[Scores]
    ) -> tuple[list[Candidate], list[int], bool]:
        """Extend every candidate by one token.

        Args:
            candidates: G candidates.
            scores: of each candidate, after the rules.

        Returns:
            The candidates to continue, the index of the candidate that each continues, and whether the
            search is done.
        """
        ...

    def finish(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return the finished candidates, without the end of text."""
        ...


class Sampling:
    """Independent candidates: the most probable token at temperature 0, a sampled token above 0."""

    def __init__(
        self, end_of_text: int, temperature: float, width: int, sampler: TokenSampler | None
    ) -> None:
        """
        Args:
            end_of_text: its id.
            temperature: 0 or above.
            width: number of candidates.
            sampler: for temperatures above 0.
        """
        self.width, self.greedy = width, temperature == 0
        self._end = end_of_text
        self._temperature = temperature
        self._sampler = sampler
        self._sums: list[list[LogSum]] = [
            [] for _ in range(width)
        ]  # of the tokens of each candidate

    def advance(
        self, candidates: list[Candidate], scores: list[Scores]
    ) -> tuple[list[Candidate], list[int], bool]:
        if self.greedy:
            tokens = [int(each.logits.argmax()) for each in scores]
        else:
            assert self._sampler is not None
            rows = np.stack([each.raised() for each in scores])
            rows /= np.float32(self._temperature)
            tokens = list(self._sampler(rows))
        additions = zip(candidates, scores, tokens, self._sums, strict=True)
        for candidate, each, token, sums in additions:
            if self._ended(candidate):
                continue
            logit = each.logits.item(token)
            sums.append(each.log_sum(logit if self.greedy else None))
            candidate.logprob += logit  # `finish` subtracts the sums
            gain, candidate.pending, candidate.opens = each.bonus_of(token)
            candidate.bonus += gain
            candidate.logprobs.append(logit)
            candidate.tokens.append(token)
        return (
            candidates,
            list(range(len(candidates))),
            all(self._ended(candidate) for candidate in candidates),
        )

    def finish(self, candidates: list[Candidate]) -> list[Candidate]:
        finished = []
        for candidate, sums in zip(candidates, self._sums, strict=True):
            totals = [each.value for each in sums]
            logprobs = [
                logit - total for logit, total in zip(candidate.logprobs, totals, strict=True)
            ]
            logprob = candidate.logprob - sum(totals)
            known = replace(candidate, logprob=logprob, logprobs=logprobs)
            finished.append(without_end(known, self._end))
        return finished

    def _ended(self, candidate: Candidate) -> bool:
        return bool(candidate.tokens) and candidate.tokens[-1] == self._end


class Beams:
    """Beam search with patience (arXiv 2204.05424). Bonuses have no part in it."""

    def __init__(self, end_of_text: int, width: int, patience: float) -> None:
        self.width, self.greedy = width, False
        self._end = end_of_text
        self._wanted = round(width * patience)
        self._finished: dict[tuple[int, ...], Candidate] = {}

    @property
    def finished(self) -> list[Candidate]:
        """The candidates that have ended."""
        return list(self._finished.values())

    def advance(
        self, candidates: list[Candidate], scores: list[Scores]
    ) -> tuple[list[Candidate], list[int], bool]:
        extended: dict[tuple[int, ...], Candidate] = {}
        sources: dict[tuple[int, ...], int] = {}
        for source, (candidate, each) in enumerate(zip(candidates, scores, strict=True)):
            total = np.float32(each.log_sum().value)
            for token in map(int, top(each.logits, self.width + 1)):
                # float32 as in openai-whisper, so that the same sums tie.
                logprob = each.logits[token] - total
                longer = candidate.extended(token, float(logprob), each)
                longer.logprob = float(np.float32(candidate.logprob) + logprob)
                tokens = tuple(longer.tokens)
                extended[tokens], sources[tokens] = longer, source

        unfinished: list[tuple[int, ...]] = []
        ended: list[tuple[int, ...]] = []
        for tokens in sorted(extended, key=lambda tokens: extended[tokens].logprob, reverse=True):
            if tokens[-1] == self._end:
                ended.append(tokens)
                continue
            unfinished.append(tokens)
            if len(unfinished) == self.width:
                break
        for tokens in ended:  # in the order of their log-probabilities
            if len(self._finished) >= self._wanted:
                break
            self._finished[tokens] = extended[tokens]
        beams = [extended[tokens] for tokens in unfinished]
        is_finished = len(self._finished) >= self._wanted
        return beams, [sources[tokens] for tokens in unfinished], is_finished

    def finish(self, candidates: list[Candidate]) -> list[Candidate]:
        finished = self.finished
        missing = max(0, self.width - len(finished))  # filled with the best unfinished ones
        by_score = sorted(candidates, key=lambda candidate: candidate.logprob, reverse=True)
        return [without_end(each, self._end) for each in (*finished, *by_score[:missing])]


class Sentences:
    """Sentences of a grammar: the most probable ones, and beside them what the model would write freely.

    Where the model's own text leaves the grammar, it is decoded beside the sentences. As soon as the most
    probable sentence is complete, it is kept if the model would not rather have written something else;
    else the model's own text is, so that its timestamps tell where the speech ends. The next sentence
    follows the kept text. Probabilities only decrease, so that no other sentence can become better.
    """

    greedy = False  # logits of improbable tokens are needed, too

    def __init__(
        self, generation: Generation, width: int, highest: float, *, timestamps: bool
    ) -> None:
        """
        Args:
            generation: special token ids of the checkpoint.
            width: number of sentences that are decoded together.
            highest: score of a sentence that is kept.
            timestamps: whether the model emits timestamps; without them, its own text is not needed.
        """
        self.width = 1
        self._width, self._highest, self._timestamps = width, highest, timestamps
        self._end, self._begin = generation.end_of_text, generation.timestamp_begin

    def advance(
        self, candidates: list[Candidate], scores: list[Scores]
    ) -> tuple[list[Candidate], list[int], bool]:
        # Each with the index of the candidate that it continues.
        sentences: list[Extended] = []
        own: Extended | None = None  # the model's own text, outside of the grammar
        for source, (candidate, each) in enumerate(zip(candidates, scores, strict=True)):
            if candidate.waits:
                extended = [candidate]
            elif each.free is None:
                extended = [self._extended(candidate, each, int(each.logits.argmax()))]
            else:
                extended = [
                    self._extended(candidate, each, int(token))
                    for token in self._best(each.raised())
                    if each.logits[token] > -np.inf
                ]
                if candidate.is_own and self._timestamps:
                    own = self._extended(candidate, each, each.free.token, leaves=True), source
            if candidate.is_free:
                own = extended[0], source
            else:
                sentences += [(each, source) for each in extended]
        sentences = sorted(sentences, key=lambda extended: extended[0].score, reverse=True)[
            : self._width
        ]
        if any(sentence.is_own for sentence, _ in sentences):
            own = None
        kept = self._decided(sentences, own)
        return [each for each, _ in kept], [source for _, source in kept], self._is_finished(kept)

    def finish(self, candidates: list[Candidate]) -> list[Candidate]:
        best = max(candidates, key=lambda candidate: (candidate.is_free, candidate.score))
        if best.is_free or (best.tokens and best.tokens[-1] < self._end):
            best = self._closed(
                replace(best, gap=IMPOSSIBLE), False
            )  # the limit of tokens cut it off
        elif best.waits:
            best = self._closed(best, best.gap <= self._highest)
        return [without_end(best, self._end)]

    def _best(self, row: Floats) -> NDArray[np.int64]:
        """Return the indices of the largest values of (V,)."""
        return np.array([row.argmax()]) if self._width == 1 else top(row, self._width)

    def _decided(self, sentences: list[Extended], own: Extended | None) -> list[Extended]:
        """Return what is decoded further, after a verdict if the best sentence is complete."""
        if sentences and not sentences[0][0].waits:
            return [*sentences, own] if own else sentences
        if not sentences:  # the model's own text is what remains
            assert own is not None
            candidate, source = own
            return [(self._closed(candidate, False) if candidate.waits else candidate, source)]
        best, source = sentences[0]
        matched = best.gap <= self._highest
        if matched or own is None:
            return [(self._closed(best, matched), source)]
        candidate, source = replace(own[0], gap=best.gap), own[1]
        return [(self._closed(candidate, False) if candidate.waits else candidate, source)]

    def _closed(self, candidate: Candidate, matched: bool) -> Candidate:
        """Return a candidate after the verdict about its sentence."""
        tokens = candidate.tokens
        is_empty = len(tokens) < 2 or tokens[-2] >= self._begin
        verdicts = candidate.verdicts
        if not (matched and is_empty):  # else there was no speech
            verdicts += (Verdict(len(tokens) - (tokens[-1] == self._end), matched, candidate.gap),)
        return replace(
            candidate, is_free=False, is_own=True, waits=False, gap=0.0, verdicts=verdicts
        )

    def _extended(
        self, candidate: Candidate, scores: Scores, token: int, *, leaves: bool = False
    ) -> Candidate:
        """Return a candidate with one more token, which may leave the grammar."""
        free, logit = scores.free, scores.logits.item(token)
        logprob = free.logprob if free and leaves else logit - scores.log_sum().value
        in_sentence = free is not None or candidate.is_free
        return Candidate(
            [*candidate.tokens, token],
            candidate.logprob + logprob,
            logprobs=[*candidate.logprobs, logprob],
            bonus=candidate.bonus + (0.0 if leaves else scores.bonus_of(token)[0]),
            is_free=candidate.is_free or leaves,
            is_own=candidate.is_own and (free is None or token == free.token),
            waits=token == self._end or (in_sentence and token >= self._begin),
            gap=candidate.gap + (free.gap(token, logit) if free and not leaves else 0.0),
            verdicts=candidate.verdicts,
        )

    def _is_finished(self, kept: list[Extended]) -> bool:
        return len(kept) == 1 and kept[0][0].tokens[-1] == self._end


def best_candidate(candidates: Sequence[Candidate], length_penalty: float | None) -> Candidate:
    """Return the candidate with the highest log-probability for its length.

    Args:
        candidates: at least one.
        length_penalty: exponent α of Google NMT's formula, 0 to 1; None: divide by the length.
    """

    def score(candidate: Candidate) -> float:
        length = len(candidate.tokens)
        if length_penalty is not None:
            return candidate.score / float(((5 + length) / 6) ** length_penalty)
        return candidate.score / length if length else -np.inf

    return max(candidates, key=score)


def top(row: Floats, count: int) -> NDArray[np.int64]:
    """Return the indices of the `count` largest values of (V,), largest first; ties by index."""
    peaks = np.maximum.reduceat(row, np.arange(0, row.size, BLOCK))
    # The maxima of `count` blocks reach the floor, so the largest values are among those that reach it.
    # This is 20 times faster than partitioning the row. `~(row < floor)` keeps NaN values.
    floor = np.partition(peaks, -count)[-count] if peaks.size >= count else -np.inf
    indices = np.flatnonzero(~(row < floor))
    return indices[np.argsort(-row[indices], kind="stable")[:count]]


def without_end(candidate: Candidate, end: int) -> Candidate:
    """Return a candidate with the tokens before the end of text, and whether there was one."""
    tokens = candidate.tokens
    ended = end in tokens
    count = tokens.index(end) if ended else len(tokens)
    return replace(
        candidate, tokens=tokens[:count], ended=ended, logprobs=candidate.logprobs[:count]
    )


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
    index = int(min(np.searchsorted(ends, at, side="right"), last))
    return index, at - float(ends[index] - weights[index])
