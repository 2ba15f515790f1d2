"""Errors between two transcripts: words, or characters in languages written without spaces."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jiwer
import numpy as np

from whisperport.text import WITHOUT_SPACES, normalize

Unit = Literal["words", "characters"]


@dataclass(frozen=True, slots=True)
class TextErrors:
    """Edits that turn a reference into a hypothesis; clips are added up with `+`."""

    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    length: int = 0  # of the reference, in units
    unit: Unit = "words"

    def __add__(self, other: "TextErrors") -> "TextErrors":
        """Raises ValueError for words and characters."""
        if other.unit != self.unit:
            raise ValueError(f"cannot add {other.unit} to {self.unit}")
        return TextErrors(
            self.substitutions + other.substitutions,
            self.deletions + other.deletions,
            self.insertions + other.insertions,
            self.length + other.length,
            self.unit,
        )

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Errors per unit of the reference; above 1 where words were invented.

        Without any in the reference (silence) it is 0 if nothing was said, and infinite otherwise.
        Add such clips to others before asking: there, invented words count like any other error.
        """
        if self.length:
            return self.errors / self.length
        return math.inf if self.errors else 0.0

    @property
    def name(self) -> str:
        """Of the rate."""
        return "WER" if self.unit == "words" else "CER"


def unit_of(language: str) -> Unit:
    """In what errors are counted, by the language's code; as in Whisper's paper, appendix C."""
    return "characters" if language in WITHOUT_SPACES else "words"


def text_errors(hypothesis: str, reference: str, unit: Unit = "words") -> TextErrors:
    """Count edits between two transcripts, without regard to case, punctuation and spacing.

    Marks do not count either, as in openai-whisper: neither accents that stand alone, nor the
    vowel signs and tones of Thai, Lao and Burmese.
    """
    split = unit == "characters"
    spoken, heard = (normalize(text, split_letters=split) for text in (reference, hypothesis))
    found = jiwer.process_words(spoken, heard)
    length = len(spoken.split())
    return TextErrors(found.substitutions, found.deletions, found.insertions, length, unit)


def bootstrap_interval(
    clips: Sequence[TextErrors], seed: int, n: int = 1000
) -> tuple[float, float]:
    """The 95% interval of the rate over clips, by drawing as many clips again, `n` times.

    Few clips give an interval that is too narrow: one gives none at all.

    Raises:
        ValueError: there are no clips, or `n` is below 1.
    """
    if not clips or n < 1:
        raise ValueError(f"{len(clips)} clips and {n} draws; at least one of each is needed")
    counts = np.array([(clip.errors, clip.length) for clip in clips])
    random = np.random.default_rng(seed)
    drawn = counts[random.integers(len(clips), size=(n, len(clips)))].sum(axis=1)
    rates = np.array([TextErrors(int(errors), 0, 0, int(length)).rate for errors, length in drawn])
    # Not interpolated: a draw of silent clips only may be infinite.
    low = np.quantile(rates, 0.025, method="lower")
    high = np.quantile(rates, 0.975, method="higher")
    return float(low), float(high)
