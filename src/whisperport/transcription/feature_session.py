"""Transcribe features: the encoder's output of consecutive windows, computed elsewhere."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from whisperport.errors import NumericalError, UsageError
from whisperport.runtime import (
    Decoded,
    Decoder,
    Engine,
    Floats,
    SegmentedWindow,
    TokenSampler,
    WindowSegment,
    detect_language,
    split_segments,
)
from whisperport.speech.audio import FRAMES_PER_SECOND
from whisperport.speech.text import Tokenizer
from whisperport.transcription.session import Language, Session, SessionWindow
from whisperport.transcription.transcribe_options import TranscribeOptions


class FeatureSession(Session):
    """The transcription of the features of consecutive windows; each window follows the one before it.

    Without the audio, no window can begin where the text of the previous one ended. A segment that the end
    of a window cuts is therefore kept, and ends there.

    Args:
        engine: the loaded programs.
        tokenizer: of the bundle.
        options: transcription options; see `check_options`.
        features: (n, T, d) float32, the encoder's output of each window.
        sampler: see `Transcriber.transcribe`.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        options: TranscribeOptions,
        features: Sequence[Floats],
        sampler: TokenSampler | None,
    ) -> None:
        frames = engine.audio_frames
        mel = _NoAudio(len(features) * frames / FRAMES_PER_SECOND)
        parts = [(n * frames, (n + 1) * frames) for n in range(len(features))]
        super().__init__(engine, tokenizer, options, mel, sampler, parts)
        self.features = features

    def next_window(self) -> SessionWindow | None:
        state = self.state
        if state.part == len(self.parts):
            return None
        state.seek, _ = self.parts[state.part]
        state.part += 1
        return SessionWindow(state.seek, np.empty((0, 0), np.float32), self.engine.audio_frames)

    def _spoken_language(self, decoder: Decoder) -> Language:
        decoder.start_window(self.features[0])
        return Language(*detect_language(decoder))

    def _features(self, window: SessionWindow, positions: int) -> Floats:
        return self.features[window.seek // window.n_frames]

    def _segments_of(
        self, decoded: Decoded, n_frames: int
    ) -> tuple[SegmentedWindow, SegmentedWindow]:
        """Return the segments of a window, with the one that the end of the window cuts."""
        begin = self.engine.generation.timestamp_begin
        split = split_segments(decoded.tokens, begin, n_frames)
        n_tokens = sum(len(segment.tokens) for segment in split.segments)
        rest = decoded.tokens[n_tokens:]
        if any(token < self.engine.generation.end_of_text for token in rest):
            start = (
                max(0, rest[0] - begin) * 2 / FRAMES_PER_SECOND
            )  # timestamps are in units of 20 ms
            cut = WindowSegment(start, n_frames / FRAMES_PER_SECOND, rest)
            split = replace(split, segments=(*split.segments, cut))
        return split, split


class _NoAudio:
    """The place of the spectrogram in a session that has features instead."""

    def __init__(self, duration_s: float) -> None:
        self.duration_s: float | None = duration_s

    def window(self, start: int) -> tuple[Floats, int]:
        raise AssertionError("features are not computed from a spectrogram")


def check_options(options: TranscribeOptions) -> None:
    """Check that a transcription of features needs no audio.

    Raises:
        UsageError: an option selects parts of the audio.
    """
    chosen = (
        ("clip_timestamps", bool(options.clip_timestamps)),
        ("vad", options.vad is not None),
        (
            "hallucination_silence_threshold",
            options.hallucination_silence_threshold is not None,
        ),
    )
    for name, is_set in chosen:
        if is_set:
            raise UsageError(
                f"`{name}` cannot be used with features",
                why="it selects parts of the audio, and features are those of complete windows",
                hint=f"do not set `{name}`, or transcribe the audio",
            )


def checked_features(engine: Engine, features: Floats | Sequence[Floats]) -> list[Floats]:
    """Return the features of every window as (T, d) float32.

    Args:
        engine: the loaded programs.
        features: (T, d) or (n, T, d), or a sequence of (T, d); floats.

    Raises:
        UsageError: there is no window, or an array has another shape or holds no floats.
        NumericalError: an array contains a NaN or an infinity.
    """
    dims = engine.dims
    shape = (dims.n_audio_ctx, dims.n_audio_state)
    single = isinstance(features, np.ndarray) and features.ndim == 2
    windows = [np.asarray(window) for window in ([features] if single else features)]
    if not windows:
        raise UsageError("no features were given", hint="give the features of at least one window")
    for number, window in enumerate(windows, start=1):
        which = f"the features of window {number} of {len(windows)}"
        if window.shape != shape or window.dtype.kind != "f":
            raise UsageError(
                f"{which} are {window.dtype} of shape {window.shape}",
                why=f"this bundle's decoder reads floats of shape {shape}: positions of 20 ms, channels",
                hint="convert the array, or choose the bundle of the same checkpoint as the encoder",
            )
        if not np.isfinite(window).all():
            bad = int(np.count_nonzero(~np.isfinite(window)))
            raise NumericalError(
                f"{which} contain {bad:,} values that are not finite",
                "encoder",
                why="the encoder's output has a NaN or an infinity, or was read in another dtype",
                hint="`whisperport diagnose BUNDLE FILE` finds the cause",
            )
    # Other objects for each call: a decoder knows the audio of a window by its array, which callers may
    # fill again for their next call.
    return [np.ascontiguousarray(window, np.float32).view() for window in windows]
