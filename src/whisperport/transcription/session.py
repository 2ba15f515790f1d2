"""One recording, or one piece of it, on its way to text: window by window, led by timestamps.

Source: openai/whisper@v20250625, whisper/transcribe.py.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from whisperport.audio import FRAMES_PER_SECOND
from whisperport.progress import ProgressCallback
from whisperport.runtime import (
    Decoded,
    DecodeOptions,
    Decoder,
    Floats,
    SegmentedWindow,
    TokenSampler,
    WindowSegment,
    decode_with_fallback,
    detect_language,
    is_silence,
    split_segments,
)
from whisperport.runtime.alignment import align_words
from whisperport.runtime.decode import prefix_room, prompt_room
from whisperport.runtime.hallucinations import KeptSegments, WindowPosition, skip_hallucinations
from whisperport.runtime.window_end import drop_unreliable_end
from whisperport.runtime.words import add_words
from whisperport.text import Segment, Tokenizer, language_code
from whisperport.transcription.incomplete import incomplete_as_error
from whisperport.transcription.options import TranscribeOptions
from whisperport.transcription.transcript import Transcript

WARM = 0.5  # above this temperature what was said is no context for what follows
SHOWN = 200  # characters of a text that was cut


class TruncatedPromptWarning(UserWarning):
    """A prompt or a prefix is longer than the decoder takes; its end is used."""


class Mel(Protocol):
    """A recording's spectrogram, of which windows are asked for from the first to the last."""

    @property
    def duration_s(self) -> float | None:
        """Of the recording, where it is known."""
        ...

    def window(self, start: int) -> tuple[Floats, int]:
        """Frames from `start` on, (n_mels, 2T), and how many of them hold sound."""
        ...


class Session:
    """One recording on its way: what was said so far, and where the next window begins.

    Args:
        decoder: of this session alone.
        parts: first frame, and the frame at which it ends or None, of each part to transcribe.
        first_features: waits for those of the first window, where another thread encodes it.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        options: TranscribeOptions,
        mel: Mel,
        sampler: TokenSampler | None,
        parts: Sequence[tuple[int, int | None]],
        first_features: Callable[[], Floats] | None = None,
    ) -> None:
        self.decoder, self.engine, self.tokenizer = decoder, decoder.engine, tokenizer
        self.options, self.mel, self.sampler, self.parts = options, mel, sampler, parts
        self.first_features = first_features
        self.initial = self._initial_prompt()
        self.decode = self._decode_options()
        self.said: list[int] = list(self.initial)
        self.seek = 0  # mel frame at which the next window begins
        self.last_speech = 0.0  # seconds at which the last word ended
        self.forgotten = 0  # how many of `said` are no longer context
        self.segments: list[Segment] = []
        self.truncated: list[float] = []
        self.language = ""
        self.detected: Language | None = None  # until the first window is encoded
        self.processed_s = 0.0  # seconds until the last window's end

    def run(self, progress: ProgressCallback) -> Transcript:
        """To the end of the recording.

        Raises:
            IncompleteError: it failed after something was said.
            Interrupted: Ctrl-C.
        """
        with incomplete_as_error(self.transcript):
            asked = self.options.decode.language
            self.detected = spoken_language(self.decoder, asked, self.mel, 0)
            self.language = self.detected.code
            for seek, mel, n_frames in self._windows():
                self._window(seek, mel, n_frames, self.language)
                self.processed_s = (seek + n_frames) / FRAMES_PER_SECOND
                progress(min(self.seek / FRAMES_PER_SECOND, self.processed_s), self.mel.duration_s)
        return self.transcript()

    def transcript(self) -> Transcript:
        """What was said until now."""
        return Transcript(
            text=self.tokenizer.decode(self.said[len(self.initial) :]).strip(),
            segments=tuple(self.segments),
            language=self.language,
            duration_s=self.mel.duration_s or self.processed_s,
            truncated=tuple(self.truncated),
        )

    def _windows(self) -> Iterator[tuple[int, Floats, int]]:
        """First frame, spectrogram (n_mels, 2T) without the sound after the part, frames of sound."""
        for start, end in self.parts:
            self.seek = max(start, self.seek)
            while end is None or self.seek < end:
                mel, n_frames = self.mel.window(self.seek)
                n_frames = min(n_frames, self.engine.audio_frames)
                if end is not None:
                    n_frames = min(n_frames, end - self.seek)
                if n_frames == 0:
                    return
                mel[:, n_frames:] = 0  # the original pads the spectrogram, not the sound
                yield self.seek, mel, n_frames

    def _window(self, seek: int, mel: Floats, n_frames: int, language: str) -> None:
        options = replace(self.decode, language=language, prompt=self._prompt())
        decoded, ratio = decode_with_fallback(
            self.decoder,
            self._features(mel),
            options,
            self.options.temperatures,
            self.options.thresholds,
            self.tokenizer.decode_with_special_tokens,
            self.sampler,
        )
        if is_silence(decoded, self.options.thresholds):
            self.seek += n_frames
            return
        begin = self.engine.generation.timestamp_begin
        cut = whole = split_segments(decoded.tokens, begin, n_frames)
        if self.engine.window is not None and n_frames == self.engine.audio_frames:
            cut = drop_unreliable_end(whole, begin, n_frames)
        if not decoded.ended and cut == whole:  # what was left open is heard again
            self.truncated.append(seek / FRAMES_PER_SECOND)
        segments = [self._segment(piece, seek, decoded, ratio) for piece in cut.segments]
        judged = KeptSegments(tuple(segments), seek + cut.advance)
        if self.options.word_timestamps:
            judged = self._with_words(segments, judged.seek, cut, seek, n_frames, language)
        # One that begins no later would never end; the original would go on for ever.
        self.seek = judged.seek if judged.seek > seek else seek + n_frames
        if not judged.restart:
            self._keep([_cleared(segment) for segment in judged.segments], decoded)

    def _features(self, mel: Floats) -> Floats:
        """Features (T, d) of a window (n_mels, 2T). The first one may have been encoded already."""
        first, self.first_features = self.first_features, None
        detected, self.detected = self.detected, None
        if first:
            return first()
        if detected and detected.encoded:
            window, features = detected.encoded
            if np.array_equal(window, mel):
                return features
        return self.engine.encode(mel)

    def _with_words(
        self,
        segments: list[Segment],
        next_seek: int,
        cut: SegmentedWindow,
        seek: int,
        n_frames: int,
        language: str,
    ) -> KeptSegments:
        """The window's segments with their words, and where those say that it ends."""
        end = self.engine.generation.end_of_text
        text = [token for segment in segments for token in segment.tokens if token < end]
        timings = align_words(
            self.decoder,
            self.tokenizer,
            text,
            language=language,
            task=self.options.decode.task,
            n_frames=n_frames,
        )
        segments = add_words(
            segments,
            timings,
            end_of_text=end,
            last_speech=self.last_speech,
            prepended=self.options.prepend_punctuations,
            appended=self.options.append_punctuations,
        )
        window = WindowPosition(
            seek / FRAMES_PER_SECOND,
            n_frames / FRAMES_PER_SECOND,
            self.engine.audio_frames / FRAMES_PER_SECOND,
            self.mel.duration_s,
        )
        spoken_until = _spoken_until(segments)
        threshold = self.options.hallucination_silence_threshold
        if spoken_until is not None and spoken_until > window.start_s and not cut.closed:
            next_seek = round(spoken_until * FRAMES_PER_SECOND)
            if threshold is not None and window.end_s - spoken_until <= threshold:
                next_seek = seek + n_frames
        judged = KeptSegments(tuple(segments), next_seek)
        if threshold is not None:
            judged = skip_hallucinations(segments, window, next_seek, self.last_speech, threshold)
        if not judged.restart and (last := _spoken_until(judged.segments)) is not None:
            self.last_speech = last
        return judged

    def _keep(self, segments: list[Segment], decoded: Decoded) -> None:
        self.segments += segments
        for segment in segments:
            self.said += segment.tokens
        if not self.options.uses_previous_text(self.engine.window) or decoded.temperature > WARM:
            self.forgotten = len(self.said)

    def _segment(self, piece: WindowSegment, seek: int, decoded: Decoded, ratio: float) -> Segment:
        start = seek / FRAMES_PER_SECOND
        return Segment(
            start=start + piece.start_s,
            end=start + piece.end_s,
            text=self.tokenizer.decode(piece.tokens),
            tokens=piece.tokens,
            avg_logprob=decoded.avg_logprob,
            no_speech_prob=decoded.no_speech_prob,
            temperature=decoded.temperature,
            compression_ratio=ratio,
            seek=seek,
        )

    def _initial_prompt(self) -> list[int]:
        tokens = self._encoded(self.options.initial_prompt)
        room = prompt_room(self.engine.dims)
        warn_if_truncated(self.tokenizer, "the initial prompt", tokens, room)
        return tokens

    def _decode_options(self) -> DecodeOptions:
        """Those of a window, but for what was said before it."""
        options = self.options.decode
        if self.options.prefix:
            options = replace(options, prefix=tuple(self._encoded(self.options.prefix)))
        room = prefix_room(self.engine.dims, options) or len(options.prefix)
        warn_if_truncated(self.tokenizer, "the prefix", options.prefix, room)
        return options

    def _encoded(self, text: str) -> list[int]:
        """Tokens of a text in the middle of speech; none of an empty one."""
        return self.tokenizer.encode(f" {text.strip()}") if text.strip() else []

    def _prompt(self) -> tuple[int, ...]:
        if not self.options.carry_initial_prompt:
            return tuple(self.said[self.forgotten :])
        room = prompt_room(self.engine.dims) - len(self.initial)
        recent = self.said[max(len(self.initial), self.forgotten) :]
        return (*self.initial, *recent[-room:])


def warn_if_truncated(tokenizer: Tokenizer, name: str, tokens: Sequence[int], room: int) -> None:
    """Say what is lost where a text has more than `room` tokens."""
    if len(tokens) <= room:
        return
    lost = tokenizer.decode(tokens[:-room]).strip()
    shown = lost if len(lost) <= SHOWN else f"{lost[:SHOWN]}…"
    warnings.warn(
        f"{name} has {len(tokens)} tokens, and the last {room} are used; "
        f"cut from its beginning: {shown}",
        TruncatedPromptWarning,
        stacklevel=2,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Language:
    """The language of a recording, and what was encoded to detect it."""

    code: str
    encoded: tuple[Floats, Floats] | None = None  # a window (n_mels, 2T), and its features (T, d)


def spoken_language(decoder: Decoder, asked: str | None, mel: Mel, start: int) -> Language:
    """The language asked for, by code or by name; or the checkpoint's own; or detected in one window.

    The audio after a recording's end is silence in that window, as in openai-whisper, which sets the
    spectrogram to 0 there in the windows that it decodes.
    """
    engine = decoder.engine
    known = engine.generation.languages
    if asked is not None:
        return Language(language_code(asked, known))
    if not known or engine.generation.language:
        return Language(detect_language(decoder))  # for which nothing is encoded
    window, _ = mel.window(start)
    window[:, engine.audio_frames :] = 0
    features = engine.encode(window)
    decoder.start_window(features)
    return Language(detect_language(decoder), (window, features))


def _cleared(segment: Segment) -> Segment:
    """As it is, or without words if it is instantaneous or has no text."""
    if segment.start != segment.end and segment.text.strip():
        return segment
    return replace(segment, text="", tokens=(), words=())


def _spoken_until(segments: Sequence[Segment]) -> float | None:
    """Seconds at which the last word ends, or where no segment has words the last segment."""
    for segment in reversed(segments):
        if segment.words:
            return segment.words[-1].end
    return segments[-1].end if segments else None


def clip_frames(clips: tuple[float, ...]) -> list[tuple[int, int | None]]:
    """Start and end of each clip; of the whole recording where there are none."""
    points: list[int | None] = [round(time * FRAMES_PER_SECOND) for time in clips] or [0]
    if len(points) % 2:
        points.append(None)
    return [(start or 0, end) for start, end in zip(points[::2], points[1::2], strict=True)]
