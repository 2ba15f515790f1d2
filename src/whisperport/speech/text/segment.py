"""The segments and words of a transcript, with times and probabilities."""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Word:
    """One word and its timestamps."""

    word: str  # with its leading space and its punctuation
    start: float  # seconds from the beginning of the audio
    end: float  # seconds from the beginning of the audio
    probability: float  # mean over its tokens, 0 to 1


@dataclass(frozen=True, slots=True)
class Match:
    """Whether speech is a sentence of a grammar."""

    matched: bool  # False: the segment has no text
    score: (
        float  # nats by which the model would rather have written something else than the sentence
    )


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of a transcript. Field names are those of openai-whisper.

    Raises:
        ValueError: a time is negative or not finite.
    """

    start: float  # seconds from the beginning of the audio
    end: float  # seconds from the beginning of the audio
    text: str  # as decoded, usually with a leading space
    tokens: tuple[int, ...] = ()  # ids of text and timestamps
    avg_logprob: float = 0.0  # mean natural log-probability of the window's tokens
    no_speech_prob: float = 0.0  # probability of <|nospeech|> in the window, 0 to 1
    temperature: float = 0.0  # at which the window was decoded
    compression_ratio: float = 0.0  # bytes of the window's text per byte after zlib compression
    seek: int = 0  # first mel frame (10 ms) of the window
    words: tuple[Word, ...] | None = None  # None: no word timestamps were requested
    # Natural log-probability of each of `tokens`; of a beam: none. `avg_logprob` is what is compared.
    logprobs: tuple[float, ...] = field(default=(), repr=False, compare=False)
    window_s: float | None = None  # length of the window in seconds; None: that of the checkpoint
    match: Match | None = None  # None: there was no grammar

    def __post_init__(self) -> None:
        for name, seconds in (("start", self.start), ("end", self.end)):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"`{name}` is {seconds}; expected seconds, not negative")
