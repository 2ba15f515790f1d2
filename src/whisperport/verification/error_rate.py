"""Count errors between two transcripts: words, or characters in languages written without spaces.

`normalize_english` is Whisper's English text normalizer, which published word error rates use. Its rules
come from the package `whisper-normalizer`. It adds four rules that openai-whisper does not have: one
turns "cause" into "because", also in "the cause of the fire". These four are removed here, so that the
result equals openai-whisper's.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from whisperport.speech.text import WITHOUT_SPACES, normalize

Unit = Literal["words", "characters"]


@dataclass(frozen=True, slots=True)
class TextErrors:
    """Number of edits that turn a reference into a hypothesis. `+` adds the counts of two clips."""

    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    length: int = 0  # number of units in the reference
    unit: Unit = "words"

    def __add__(self, other: "TextErrors") -> "TextErrors":
        """Add the counts of two clips.

        Raises:
            ValueError: one counts words, the other characters.
        """
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
        """Number of substitutions, deletions and insertions."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Errors per unit of the reference. Inserted words can make the rate larger than 1.

        If the reference is empty (silence), the rate is 0 for an empty hypothesis and infinite otherwise.
        Add the counts of such clips to those of other clips first: then inserted words count as errors.
        """
        if self.length:
            return self.errors / self.length
        return math.inf if self.errors else 0.0

    @property
    def name(self) -> str:
        """Name of the rate: "WER", or "CER" where characters are counted."""
        return "WER" if self.unit == "words" else "CER"


def unit_of(language: str) -> Unit:
    """Return the unit that errors are counted in for a language code.

    Source: Radford et al. 2022 (Whisper's paper), appendix C.
    """
    return "characters" if language in WITHOUT_SPACES else "words"


def text_errors(hypothesis: str, reference: str, unit: Unit = "words") -> TextErrors:
    """Count the edits between two transcripts, without regard to case, punctuation and spacing.

    Both texts are normalized as openai-whisper's `BasicTextNormalizer` does. Combining marks are
    removed too: separate accents, and the vowel signs and tones of Thai, Lao and Burmese.

    This is the plain rate, which every check uses. `whisper_text_errors` counts as published rates do.
    """
    split = unit == "characters"
    expected, actual = (normalize(text, split_letters=split) for text in (reference, hypothesis))
    return _count(expected, actual, unit)


def whisper_text_errors(
    hypothesis: str, reference: str, language: str = "en", unit: Unit | None = None
) -> TextErrors:
    """Count the edits between two transcripts after Whisper's normalizer for the language.

    English words are compared after `normalize_english`: "I'll" equals "I will", and "ten" equals "10".
    For another language, and for characters, Whisper uses its basic normalizer. The result then equals
    that of `text_errors`.

    Args:
        hypothesis: the transcript to rate.
        reference: the correct transcript.
        language: code of the language of both, such as "en".
        unit: what is counted; None: what `unit_of` returns for the language.
    """
    unit = unit or unit_of(language)
    if language != "en" or unit == "characters":
        return text_errors(hypothesis, reference, unit)
    return _count(normalize_english(reference), normalize_english(hypothesis), unit)


def _count(expected: str, actual: str, unit: Unit) -> TextErrors:
    import jiwer  # here: a transcription imports this module, and counts nothing

    counts = jiwer.process_words(expected, actual)
    length = len(expected.split())
    return TextErrors(counts.substitutions, counts.deletions, counts.insertions, length, unit)


def increase_bounds(
    pairs: Sequence[tuple[TextErrors, TextErrors]], n: int = 2000
) -> tuple[float, float]:
    """Return the one-sided 95% bounds of how much a rate increases, by a paired bootstrap over clips.

    A loss that no clip shows cannot be drawn. The upper bound therefore counts one clip more, which loses
    as many words as the worst one does, at least one. Simulated with 150 clips of which a tenth lose up to
    six words: such a bound holds in 98 of 100 cases, without this clip in 93. Where no clip differs, it is
    3 / length, the rule of three.

    Args:
        pairs: of each clip, the errors of the tested and of the compared transcript; one at least, and
            one with a length above 0.
        n: number of resamples.

    Returns:
        The bound that the increase is above with a confidence of 95%, and the one that it is below.
    """
    change = np.array([tested.errors - compared.errors for tested, compared in pairs])
    length = np.array([compared.length for _, compared in pairs])
    if not change.any():
        return 0.0, 3 / int(length.sum())
    low = np.quantile(_resampled(change, length, n), 0.05)
    unseen = max(int(change.max()), 1)
    high = np.quantile(_resampled(np.append(change, unseen), np.append(length, 0), n), 0.95)
    return float(low), float(high)


def _resampled(change: NDArray[Any], length: NDArray[Any], n: int) -> NDArray[Any]:
    """Return the rates of n resamples, with replacement, of changes and lengths by clip."""
    chosen = np.random.default_rng(0).integers(len(change), size=(n, len(change)))
    return np.asarray(change[chosen].sum(axis=1) / np.maximum(length[chosen].sum(axis=1), 1))


def bootstrap_interval(
    clips: Sequence[TextErrors], seed: int, n: int = 1000
) -> tuple[float, float]:
    """Return the 95% bootstrap interval of the rate over clips.

    The clips are resampled with replacement `n` times. With few clips the interval is too narrow; with
    one clip its width is 0.

    Args:
        clips: error counts of each clip.
        seed: seed of the random generator.
        n: number of resamples.

    Returns:
        The 2.5% and the 97.5% quantile of the rate.

    Raises:
        ValueError: there are no clips, or `n` is below 1.
    """
    if not clips or n < 1:
        raise ValueError(f"{len(clips)} clips and {n} resamples; at least one of each is needed")
    counts = np.array([(clip.errors, clip.length) for clip in clips])
    random = np.random.default_rng(seed)
    sums = counts[random.integers(len(clips), size=(n, len(clips)))].sum(axis=1)
    rates = np.array([TextErrors(int(errors), 0, 0, int(length)).rate for errors, length in sums])
    # No interpolation: the rate of a resample that holds silent clips only can be infinite.
    low = np.quantile(rates, 0.025, method="lower")
    high = np.quantile(rates, 0.975, method="higher")
    return float(low), float(high)


_ADDED_BY_PACKAGE = (r"\bcause\b", r"\bdunno\b", r"\bkinda\b", r"\bsorta\b")


def normalize_english(text: str) -> str:
    """Normalize English text as openai-whisper's `EnglishTextNormalizer` does.

    Contractions are expanded, numbers are written in digits and British spelling becomes American. Case,
    punctuation, text in brackets and words such as "um" are removed. "I'll take twenty-five colours"
    becomes "i will take 25 colors".

    Source: Radford et al. 2022, appendix C; openai-whisper 20250625, `whisper/normalizers/english.py`.
    """
    try:
        return _normalizer()(text).strip()
    except AssertionError:  # a number of more than 4300 digits, which Python does not convert
        return normalize(text)


@cache
def _normalizer() -> Callable[[str], str]:
    with warnings.catch_warnings():
        # Python 3.12 warns of an escape in its source. The import takes 0.1 s: only where it is needed.
        warnings.simplefilter("ignore", SyntaxWarning)
        from whisper_normalizer.english import EnglishTextNormalizer

    normalizer = EnglishTextNormalizer()
    for pattern in _ADDED_BY_PACKAGE:
        normalizer.replacers.pop(pattern, None)
    apply: Callable[[str], str] = normalizer
    return apply
