"""One recording, or one piece of it, on its way to text: window by window, led by timestamps.

Source: openai/whisper@v20250625, whisper/transcribe.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from whisperport.audio import FRAMES_PER_SECOND
from whisperport.runtime import (
    Cut,
    Decoded,
    Draw,
    Engine,
    Floats,
    Piece,
    cut_segments,
    decode_with_fallback,
    detect_language,
    is_silence,
)
from whisperport.runtime.alignment import align_words
from whisperport.runtime.hallucinations import Judged, Window, skip_hallucinations
from whisperport.runtime.words import add_words
from whisperport.text import Segment, Tokenizer
from whisperport.transcription.options import TranscribeOptions
from whisperport.transcription.transcript import Heard, Transcript

WARM = 0.5  # above this temperature what was said is no context for what follows


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
        parts: first frame, and the frame at which it ends or None, of each part to transcribe.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        options: TranscribeOptions,
        mel: Mel,
        draw: Draw | None,
        parts: Sequence[tuple[int, int | None]],
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.options, self.mel, self.draw, self.parts = options, mel, draw, parts
        self.initial = self._initial_prompt()
        self.said: list[int] = list(self.initial)
        self.seek = 0  # mel frame at which the next window begins
        self.last_speech = 0.0  # seconds at which the last word ended
        self.forgotten = 0  # how many of `said` are no longer context
        self.segments: list[Segment] = []
        self.truncated: list[float] = []

    def run(self, progress: Heard) -> Transcript:
        language = self.options.decode.language or self._language()
        seconds = 0.0
        for seek, mel, n_frames in self._windows():
            self._window(seek, mel, n_frames, language)
            seconds = (seek + n_frames) / FRAMES_PER_SECOND
            progress(min(self.seek / FRAMES_PER_SECOND, seconds), self.mel.duration_s)
        return Transcript(
            text=self.tokenizer.decode(self.said[len(self.initial) :]).strip(),
            segments=tuple(self.segments),
            language=language,
            duration_s=self.mel.duration_s or seconds,
            truncated=tuple(self.truncated),
        )

    def _windows(self) -> Iterator[tuple[int, Floats, int]]:
        """First frame, spectrogram (n_mels, 2T) without the sound after the part, frames of sound."""
        for start, end in self.parts:
            self.seek = max(start, self.seek)
            while end is None or self.seek < end:
                mel, n_frames = self.mel.window(self.seek)
                n_frames = min(n_frames, self.engine.sound_frames)
                if end is not None:
                    n_frames = min(n_frames, end - self.seek)
                if n_frames == 0:
                    return
                mel[:, n_frames:] = 0  # the original pads the spectrogram, not the sound
                yield self.seek, mel, n_frames

    def _window(self, seek: int, mel: Floats, n_frames: int, language: str) -> None:
        options = replace(self.options.decode, language=language, prompt=self._prompt())
        decoded, ratio = decode_with_fallback(
            self.engine,
            self.engine.encode(mel),
            options,
            self.options.temperatures,
            self.options.thresholds,
            self.tokenizer.decode,
            self.draw,
        )
        if is_silence(decoded, self.options.thresholds):
            self.seek += n_frames
            return
        cut = cut_segments(decoded.tokens, self.engine.generation.timestamp_begin, n_frames)
        if not decoded.ended:
            self.truncated.append(seek / FRAMES_PER_SECOND)
        segments = [self._segment(piece, seek, decoded, ratio) for piece in cut.pieces]
        judged = Judged(tuple(segments), seek + cut.advance)
        if self.options.word_timestamps:
            judged = self._with_words(segments, judged.seek, cut, seek, n_frames, language)
        # One that begins no later would never end; the original would go on for ever.
        self.seek = judged.seek if judged.seek > seek else seek + n_frames
        if not judged.restart:
            self._keep([_cleared(segment) for segment in judged.segments], decoded)

    def _with_words(
        self,
        segments: list[Segment],
        next_seek: int,
        cut: Cut,
        seek: int,
        n_frames: int,
        language: str,
    ) -> Judged:
        """The window's segments with their words, and where those say that it ends."""
        end = self.engine.generation.end_of_text
        text = [token for segment in segments for token in segment.tokens if token < end]
        timings = align_words(
            self.engine,
            self.tokenizer,
            text,
            language=language,
            task=self.options.decode.task,
            n_frames=n_frames,
        )
        segments = add_words(segments, timings, end_of_text=end, last_speech=self.last_speech)
        window = Window(
            seek / FRAMES_PER_SECOND,
            n_frames / FRAMES_PER_SECOND,
            self.engine.sound_frames / FRAMES_PER_SECOND,
            self.mel.duration_s,
        )
        spoken_until = _spoken_until(segments)
        threshold = self.options.hallucination_silence_threshold
        if spoken_until is not None and spoken_until > window.start_s and not cut.closed:
            next_seek = round(spoken_until * FRAMES_PER_SECOND)
            if threshold is not None and window.end_s - spoken_until <= threshold:
                next_seek = seek + n_frames
        judged = Judged(tuple(segments), next_seek)
        if threshold is not None:
            judged = skip_hallucinations(segments, window, next_seek, self.last_speech, threshold)
        if not judged.restart and (last := _spoken_until(judged.segments)) is not None:
            self.last_speech = last
        return judged

    def _keep(self, segments: list[Segment], decoded: Decoded) -> None:
        self.segments += segments
        for segment in segments:
            self.said += segment.tokens
        if not self.options.condition_on_previous_text or decoded.temperature > WARM:
            self.forgotten = len(self.said)

    def _segment(self, piece: Piece, seek: int, decoded: Decoded, ratio: float) -> Segment:
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

    def _language(self) -> str:
        """Of the first window, with the sound after the first clip and the padding in it."""
        return language_at(self.engine, self.mel, 0)

    def _initial_prompt(self) -> list[int]:
        prompt = self.options.initial_prompt.strip()
        return self.tokenizer.encode(f" {prompt}") if prompt else []

    def _prompt(self) -> tuple[int, ...]:
        if not self.options.carry_initial_prompt:
            return tuple(self.said[self.forgotten :])
        room = self.engine.dims.n_text_ctx // 2 - 1 - len(self.initial)
        recent = self.said[max(len(self.initial), self.forgotten) :]
        return (*self.initial, *recent[-room:])


def language_at(engine: Engine, mel: Mel, start: int) -> str:
    """The most probable language of one window; "en" for an English-only model."""
    if not engine.generation.languages:
        return "en"
    window, _ = mel.window(start)
    window[:, engine.sound_frames :] = 0
    engine.listen(engine.encode(window))
    return detect_language(engine)


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
