"""Which token follows: the most probable, a drawn one, or several in parallel as beams.

A search keeps G paths through the decoder in step with each other, each with a cache of its own.
Source: openai/whisper@v20250625, whisper/decoding.py:270-417.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from whisperport.runtime.cache import Floats

BLOCK = 256  # tokens of a row looked at together: a row has some hundred blocks

TokenSampler = Callable[[Floats], Sequence[int]]
"""Draw one token from each row of logits (G, V), already divided by the temperature."""


@dataclass(slots=True)
class Path:
    """Tokens said so far, without the prompt, and the sum of their natural log-probabilities."""

    said: list[int] = field(default_factory=list)
    logprob: float = 0.0
    ended: bool = False  # an end of text followed


class Search(Protocol):
    """How the next tokens of all paths are chosen."""

    width: int  # G: paths kept in parallel

    def advance(
        self, paths: list[Path], logits: list[Floats]
    ) -> tuple[list[Path], list[int], bool]:
        """One token further.

        paths    G paths
        logits   G rows (V,), filtered
        returns  the G paths that go on; the index of the path each came from; whether all is said
        """
        ...

    def finish(self, paths: list[Path]) -> list[Path]:
        """The candidates, each without an end of text."""
        ...


class Sampling:
    """Independent paths: the most probable token at temperature 0, a drawn one above."""

    def __init__(
        self, end_of_text: int, temperature: float, width: int, sampler: TokenSampler
    ) -> None:
        self.width = width
        self._end = end_of_text
        self._temperature = temperature
        self._sampler = sampler

    def advance(
        self, paths: list[Path], logits: list[Floats]
    ) -> tuple[list[Path], list[int], bool]:
        if self._temperature == 0:
            tokens = [int(row.argmax()) for row in logits]
        else:
            rows = np.stack(logits)
            rows /= np.float32(self._temperature)
            tokens = list(self._sampler(rows))
        for path, row, token in zip(paths, logits, tokens, strict=True):
            if self._ended(path):
                continue
            path.logprob += float(row[token] - log_sum_exp(row))
            path.said.append(token)
        return paths, list(range(len(paths))), all(self._ended(path) for path in paths)

    def finish(self, paths: list[Path]) -> list[Path]:
        return [_candidate(path.said, path.logprob, self._end) for path in paths]

    def _ended(self, path: Path) -> bool:
        return bool(path.said) and path.said[-1] == self._end


class Beams:
    """Beam search with patience (arXiv 2204.05424)."""

    def __init__(self, end_of_text: int, width: int, patience: float) -> None:
        self.width = width
        self._end = end_of_text
        self._wanted = round(width * patience)
        self._finished: dict[tuple[int, ...], float] = {}

    def advance(
        self, paths: list[Path], logits: list[Floats]
    ) -> tuple[list[Path], list[int], bool]:
        scores: dict[tuple[int, ...], float] = {}
        sources: dict[tuple[int, ...], int] = {}
        for source, (path, row) in enumerate(zip(paths, logits, strict=True)):
            total = log_sum_exp(row)
            for token in top(row, self.width + 1):
                said = (*path.said, int(token))
                # float32 as in the original: two sums that differ later must not tie here, or back
                scores[said] = float(np.float32(path.logprob) + (row[token] - total))
                sources[said] = source

        going: list[tuple[int, ...]] = []
        ended: dict[tuple[int, ...], float] = {}
        for said in sorted(scores, key=scores.__getitem__, reverse=True):
            if said[-1] == self._end:
                ended[said] = scores[said]
                continue
            going.append(said)
            if len(going) == self.width:
                break
        for said, score in ended.items():  # in the order of their scores
            if len(self._finished) >= self._wanted:
                break
            self._finished[said] = score
        next_paths = [Path(list(said), scores[said]) for said in going]
        return next_paths, [sources[said] for said in going], len(self._finished) >= self._wanted

    def finish(self, paths: list[Path]) -> list[Path]:
        candidates = [_candidate(said, score, self._end) for said, score in self._finished.items()]
        missing = max(0, self.width - len(candidates))  # unfinished ones fill up, best first
        by_score = sorted(paths, key=lambda path: path.logprob, reverse=True)
        return candidates + [_candidate(p.said, p.logprob, self._end) for p in by_score[:missing]]


def best(candidates: Sequence[Path], length_penalty: float | None) -> Path:
    """The most probable candidate for its length; with a penalty α, by Google NMT's formula."""

    def score(path: Path) -> float:
        length = len(path.said)
        if length_penalty is not None:
            return path.logprob / float(((5 + length) / 6) ** length_penalty)
        return path.logprob / length if length else -np.inf

    return max(candidates, key=score)


def log_sum_exp(row: Floats) -> np.float32:
    """Natural log of the sum of exponentials of (V,)."""
    peak = row.max()
    weights = row - peak
    np.exp(weights, out=weights)
    return np.float32(peak + np.log(weights.sum()))


def top(row: Floats, count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest of (V,), the largest first, of equals the first."""
    peaks = np.maximum.reduceat(row, np.arange(0, row.size, BLOCK))
    # As many blocks reach it, so the largest are among what reaches it: 20 times quicker than to
    # partition the row. Not below, rather than above: what is no number counts as large.
    floor = np.partition(peaks, -count)[-count] if peaks.size >= count else -np.inf
    found = np.flatnonzero(~(row < floor))
    return found[np.argsort(-row[found], kind="stable")[:count]]


def _candidate(said: Sequence[int], logprob: float, end: int) -> Path:
    """A path as it is judged: what was said before the end of text, and whether that came."""
    if end in said:
        return Path(list(said[: said.index(end)]), logprob, ended=True)
    return Path(list(said), logprob)


def numpy_sampler(generator: np.random.Generator) -> TokenSampler:
    """Draw with a numpy generator, one number for each row."""

    def sampler(logits: Floats) -> list[int]:
        return [_drawn(row, generator.random()) for row in logits]

    return sampler


def _drawn(row: Floats, uniform: float) -> int:
    """The token at `uniform`, between 0 and 1, of the distribution: its block first, then itself."""
    weights = row - row.max()
    np.exp(weights, out=weights)
    sums = np.add.reduceat(weights, np.arange(0, row.size, BLOCK))
    block, rest = _place(sums, uniform * sums.sum())
    token, _ = _place(weights[block * BLOCK : (block + 1) * BLOCK], rest)
    return block * BLOCK + token


def _place(weights: NDArray[Any], at: float) -> tuple[int, float]:
    """Which of `weights` in a row `at` falls into, and how far; never one that is 0."""
    ends = np.cumsum(weights, dtype=np.float64)
    last = np.searchsorted(ends, ends[-1])  # where rounding led beyond all
    found = int(min(np.searchsorted(ends, at, side="right"), last))
    return found, at - float(ends[found] - weights[found])
