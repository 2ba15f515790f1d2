"""Search with phrases: beside the texts that there are without a list, those with a listed phrase."""

import numpy as np

from whisperport.runtime.decoding.search import (
    LEAST_BONUS,
    Beams,
    Candidate,
    Extended,
    top,
    without_end,
)
from whisperport.runtime.engine.scores import FORK_MARGIN, LogSum, Scores

N_FORKS = 3  # texts with a listed phrase that are decoded beside those without a list


class Forks:
    """Greedy decoding that tries phrases: the best text, and beside it those that are inside a phrase.

    The bonus of a phrase's first token alone would decide too early. So a text in which a phrase has begun
    is decoded beside the best one until the phrase is complete or too improbable; their scores then tell.
    A text whose phrase has not become complete is dropped: greedy decoding would not have tried it.
    """

    width, greedy = 1, True

    def __init__(self, end_of_text: int) -> None:
        self._end = end_of_text
        self._ended: list[Candidate] = []
        self._has_best = True  # whether the first candidate is the best text
        # By number of tokens before: of the steps at which there was one text. It is the same for all texts
        # that continue it, so that it can be subtracted at the end, when this takes a fifth of the time.
        self._sums: dict[int, LogSum] = {}

    def advance(
        self, candidates: list[Candidate], scores: list[Scores]
    ) -> tuple[list[Candidate], list[int], bool]:
        extended: list[Extended] = []
        is_alone = len(candidates) == 1 and self._has_best and not self._ended
        for source, (candidate, each) in enumerate(zip(candidates, scores, strict=True)):
            best = int(each.logits.argmax())
            peak = each.logits.item(best)
            if is_alone:
                total, self._sums[len(candidate.tokens)] = 0.0, each.log_sum(peak)
            else:
                total = each.log_sum(peak).value
            is_best = source == 0 and self._has_best
            least = peak - FORK_MARGIN if is_best else -np.inf
            for token in dict.fromkeys((best, *each.preferred(N_FORKS + 1, least))):
                longer = candidate.extended(token, each.logits.item(token) - total, each)
                if longer.has_phrase or (is_best and token == best):
                    extended.append((longer, source))
        kept = [max(extended, key=_score)] if extended else []
        if kept and kept[0][0].tokens[-1] == self._end:
            self._ended.append(kept.pop()[0])
        floor = max([*(each.score for each in self._ended), *map(_score, kept)], default=-np.inf)
        kept = [each for each in kept if _score(each) == floor]
        self._has_best = bool(kept)
        inside = [each for each in extended if each[0].opens and each not in kept]
        kept += _forks(inside, floor)
        return [each for each, _ in kept], [source for _, source in kept], not kept

    def finish(self, candidates: list[Candidate]) -> list[Candidate]:
        best = max((*self._ended, *candidates), key=lambda candidate: candidate.score)
        for index, log_sum in self._sums.items():
            best.logprobs[index] -= log_sum.value
            best.logprob -= log_sum.value
        return [without_end(best, self._end)]


class BeamsAndForks:
    """Beam search, and beside it texts with a phrase. Their scores at the end tell which is the best.

    The beams are those without a list, so that a phrase that no text has changes nothing.
    """

    greedy = False

    def __init__(self, end_of_text: int, width: int, patience: float) -> None:
        self.width = width
        self._end = end_of_text
        self._beams = Beams(end_of_text, width, patience)
        self._n_beams = width  # the first candidates; 0: enough beams have ended
        self._last: list[Candidate] = []  # beams of the last step
        self._ended: list[Candidate] = []  # with a phrase

    def advance(
        self, candidates: list[Candidate], scores: list[Scores]
    ) -> tuple[list[Candidate], list[int], bool]:
        n_beams, kept = self._n_beams, list[Extended]()
        if n_beams:
            self._last, sources, is_finished = self._beams.advance(
                candidates[:n_beams], scores[:n_beams]
            )
            kept = [] if is_finished else list(zip(self._last, sources, strict=True))
            self._n_beams = len(kept)
        compared = [each for each, _ in kept] or [*self._beams.finished, *self._ended]
        # With little patience, the search may end before a text has.
        floor = max((each.score for each in compared), default=np.inf)
        known = {tuple(each.tokens) for each in (*compared, *self._beams.finished)}
        extended: list[Extended] = []
        for source, (candidate, each) in enumerate(zip(candidates, scores, strict=True)):
            total = each.log_sum().value
            best = top(each.logits, 2).tolist() if source >= n_beams else ()
            # What its logit must exceed for the prospect of `_forks`; a list may have 10,000 tokens.
            least = floor - FORK_MARGIN - candidate.score + total - LEAST_BONUS
            for token in dict.fromkeys((*best, *each.preferred(N_FORKS + 1, least))):
                longer = candidate.extended(token, each.logits.item(token) - total, each)
                tokens = tuple(longer.tokens)
                if not longer.has_phrase or tokens in known:
                    continue
                known.add(tokens)  # at the start, all beams are equal
                if token == self._end:
                    self._ended.append(longer)
                else:
                    extended.append((longer, source))
        kept += _forks(extended, floor)
        return [each for each, _ in kept], [source for _, source in kept], not kept

    def finish(self, candidates: list[Candidate]) -> list[Candidate]:
        beams = self._beams.finish(self._last)
        forks = (
            self._ended if self._beams.finished else [*self._ended, *candidates[self._n_beams :]]
        )
        return [*beams, *(without_end(each, self._end) for each in forks)]


def _forks(extended: list[Extended], floor: float) -> list[Extended]:
    """Return the texts with a phrase that may become better than another one, which has this score."""
    hopeful = [each for each in extended if _prospect(each) > floor - FORK_MARGIN]
    return sorted(hopeful, key=_prospect, reverse=True)[:N_FORKS]


def _score(extended: Extended) -> float:
    return extended[0].score


def _prospect(extended: Extended) -> float:
    return extended[0].prospect
