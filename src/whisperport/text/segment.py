"""One piece of a transcript: what was said, when, and how sure the model was."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Word:
    """One word, and when it was spoken."""

    word: str  # with its leading space and its punctuation
    start: float  # seconds from the beginning of the sound
    end: float  # seconds
    probability: float  # mean over its tokens


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of speech between two times. Names are openai-whisper's.

    Raises ValueError for a time that is negative or no number.
    """

    start: float  # seconds from the beginning of the sound
    end: float  # seconds
    text: str  # as decoded, usually with a leading space
    tokens: tuple[int, ...] = ()  # ids, timestamps among them
    avg_logprob: float = 0.0  # mean log-probability of the window's tokens, natural logarithm
    no_speech_prob: float = 0.0  # probability of <|nospeech|> at the window's first position
    temperature: float = 0.0  # it was sampled at; 0 is greedy
    compression_ratio: float = 0.0  # of the window's text by zlib; high for repetitions
    seek: int = 0  # first mel frame (10 ms) of the window it came from
    words: tuple[Word, ...] | None = None  # None: times of words were not asked for

    def __post_init__(self) -> None:
        for name, seconds in (("start", self.start), ("end", self.end)):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"`{name}` is {seconds}; expected seconds, not negative")
