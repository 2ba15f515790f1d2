"""Word error rate between two transcripts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jiwer
import numpy as np

from whisperport.text.normalize import normalize


@dataclass(frozen=True, slots=True)
class WordErrors:
    """Edits that turn a reference into a hypothesis; clips are added up with `+`."""

    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    n_words: int = 0  # in the reference

    def __add__(self, other: "WordErrors") -> "WordErrors":
        return WordErrors(
            self.substitutions + other.substitutions,
            self.deletions + other.deletions,
            self.insertions + other.insertions,
            self.n_words + other.n_words,
        )

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Errors per word of the reference; above 1 where words were invented.

        Without reference words (silence) it is 0 if nothing was said, and infinite otherwise. Add
        such clips to others before asking: there, invented words count like any other error.
        """
        if self.n_words:
            return self.errors / self.n_words
        return math.inf if self.errors else 0.0


def word_errors(hypothesis: str, reference: str) -> WordErrors:
    """Count edits between two transcripts, without regard to case, punctuation and spacing."""
    spoken, heard = normalize(reference), normalize(hypothesis)
    found = jiwer.process_words(spoken, heard)
    return WordErrors(found.substitutions, found.deletions, found.insertions, len(spoken.split()))


def bootstrap_interval(
    clips: Sequence[WordErrors], seed: int, n: int = 1000
) -> tuple[float, float]:
    """The 95% interval of the rate over clips, by drawing as many clips again, `n` times.

    Few clips give an interval that is too narrow: one gives none at all.

    Raises:
        ValueError: there are no clips, or `n` is below 1.
    """
    if not clips or n < 1:
        raise ValueError(f"{len(clips)} clips and {n} draws; at least one of each is needed")
    counts = np.array([(clip.errors, clip.n_words) for clip in clips])
    random = np.random.default_rng(seed)
    drawn = counts[random.integers(len(clips), size=(n, len(clips)))].sum(axis=1)
    rates = np.array([WordErrors(int(errors), 0, 0, int(words)).rate for errors, words in drawn])
    # Not interpolated: a draw of silent clips only may be infinite.
    low = np.quantile(rates, 0.025, method="lower")
    high = np.quantile(rates, 0.975, method="higher")
    return float(low), float(high)
