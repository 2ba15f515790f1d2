"""What a checkpoint emits in eager torch, decoded as an app decodes, for a comparison with the app."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whisperport.build.layouts.layout import DecodingProfile
from whisperport.program.dims import SECONDS_PER_POSITION
from whisperport.runtime import DecodeOptions, Decoder, Engine, split_segments
from whisperport.runtime.decoding.decode import decode_window
from whisperport.speech.audio import FRAMES_PER_SECOND, HOP_LENGTH, log_mel
from whisperport.speech.text import Tokenizer
from whisperport.system.progress import Counted, begin_stage
from whisperport.verification.clips import Clip
from whisperport.verification.eager_engine import eager_engine

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TimedText:
    """A segment: its start and end in seconds, and its text."""

    start_s: float
    end_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Emitted:
    """What was emitted for one clip.

    Attributes:
        tokens: ids, without the prompt and the end of text; of an app that returns no timestamps as ids,
            those of the text; of an app that returns none, empty.
        text: without timestamps.
        segments: with their start and end.
        timestamp_begin: id of <|0.00|>; 0: not known.
    """

    tokens: tuple[int, ...]
    text: str
    segments: tuple[TimedText, ...]
    timestamp_begin: int = 0

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """The ids that are no timestamps."""
        return tuple(token for token in self.tokens if token < self.timestamp_begin)


def reference_of(
    checkpoint: "Checkpoint",
    profile: DecodingProfile,
    clips: Sequence[Clip],
) -> list[Emitted]:
    """Decode clips greedily with the checkpoint in eager torch, under an app's profile.

    Raises:
        UsageError: the checkpoint does not know a clip's language.
    """
    from whisperport.model.network.whisper import build_model

    generation = checkpoint.generation
    tokenizer = Tokenizer.from_json(checkpoint.tokenizer_json.decode(), generation)
    engine = eager_engine(build_model(checkpoint), generation)
    results = []
    for index, clip in enumerate(clips):
        begin_stage(Counted(f"running the model in torch on {clip.name}", index, len(clips)))
        results.append(_emitted(engine, tokenizer, profile, clip))
    return results


def _emitted(engine: Engine, tokenizer: Tokenizer, profile: DecodingProfile, clip: Clip) -> Emitted:
    """Decode window after window, as openai-whisper does, or the first window only."""
    options = DecodeOptions(
        language=clip.language,
        without_timestamps=not profile.timestamps,
        suppress_tokens=(-1,) if profile.suppresses else (),
        suppress_blank=profile.suppresses_at_start,
    )
    generation, decoder = engine.generation, Decoder(engine)
    tokens: list[int] = []
    segments: list[TimedText] = []
    n_frames, seek = len(clip.samples) // HOP_LENGTH, 0
    mel = _spectrogram(clip.samples, engine, profile)
    while seek < n_frames:
        window = mel[:, seek : seek + engine.dims.n_frames]
        decoded = decode_window(decoder, engine.encode(window), options)
        size = min(engine.dims.n_frames, n_frames - seek)
        tokens += decoded.tokens
        if not decoded.tokens:
            break
        split = split_segments(decoded.tokens, generation.timestamp_begin, size)
        window_s = seek / FRAMES_PER_SECOND
        for segment in split.segments:
            # A window without a pair of timestamps is one segment from 0; apps take its first timestamp.
            first = max(0, segment.tokens[0] - generation.timestamp_begin) * SECONDS_PER_POSITION
            times = window_s + first, window_s + segment.end_s
            segments.append(TimedText(*times, tokenizer.decode(segment.tokens)))
        if not profile.windows:
            break
        seek += split.advance
    text, begin = tokenizer.decode(tokens), generation.timestamp_begin
    return Emitted(tuple(tokens), text, tuple(segments), begin)


def _spectrogram(samples: Floats, engine: Engine, profile: DecodingProfile) -> Floats:
    """Return the log-mel spectrogram (n_mels, n + 2T) of a clip of n frames and a window of padding."""
    n_frames = len(samples) // HOP_LENGTH
    mel = log_mel(samples, engine.dims.n_mels, n_frames=n_frames + engine.dims.n_frames)
    if profile.padding == "mel":
        mel[:, n_frames:] = 0
    return mel
