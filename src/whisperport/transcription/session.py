"""Transcribe audio, or parts of it, window by window; timestamps decide where the next window begins.

Source: openai/whisper@v20250625, whisper/transcribe.py.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from whisperport.runtime import (
    Decoded,
    DecodeOptions,
    Decoder,
    Engine,
    Floats,
    SegmentedWindow,
    Steps,
    TokenSampler,
    WindowSegment,
    complete,
    decoding_with_fallback,
    detect_language,
    is_silence,
    split_segments,
)
from whisperport.runtime.decoding.alignment import align_words
from whisperport.runtime.decoding.decode import own_language, prefix_room, prompt_room
from whisperport.runtime.decoding.hallucinations import (
    KeptSegments,
    WindowPosition,
    skip_hallucinations,
)
from whisperport.runtime.decoding.segments import drop_unreliable_end
from whisperport.runtime.decoding.words import add_words
from whisperport.speech.audio import FRAMES_PER_SECOND
from whisperport.speech.text import Segment, Tokenizer, language_code
from whisperport.system.progress import ProgressCallback
from whisperport.transcription.options import TranscribeOptions
from whisperport.transcription.transcript import Transcript, incomplete_as_error

MAX_CONTEXT_TEMPERATURE = 0.5  # text decoded above it is not used as the prompt of the next window
MAX_QUOTED = 200  # characters of a text in a warning


class TruncatedPromptWarning(UserWarning):
    """A prompt or a prefix has more tokens than the decoder can use. Its last tokens are used."""


class Mel(Protocol):
    """The spectrogram of an audio file, whose windows are read from the first to the last."""

    @property
    def duration_s(self) -> float | None:
        """Duration of the audio in seconds; None: unknown."""
        ...

    def window(self, start: int) -> tuple[Floats, int]:
        """Return the mel frames from `start` on, (n_mels, 2T), and the number of frames with audio."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SessionWindow:
    """A window of the audio that was read and not yet decoded."""

    seek: int  # its first mel frame
    mel: Floats  # (n_mels, 2T); 0 after the end of the part
    n_frames: int  # number of frames with audio


class Session:
    """The transcription of one audio file: the text so far, and where the next window begins.

    No decoder is needed between two windows, and each may be decoded with another one: `steps` is one way
    to call `detect_language`, `next_window` and `decode_window`.

    Args:
        engine: the loaded programs.
        tokenizer: of the bundle.
        options: transcription options.
        mel: spectrogram of the audio.
        sampler: see `Transcriber.transcribe`.
        parts: first mel frame and end (None: the end of the audio) of each part to transcribe.
        first_features: returns the features of the first window, if another thread encodes it.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        options: TranscribeOptions,
        mel: Mel,
        sampler: TokenSampler | None,
        parts: Sequence[tuple[int, int | None]],
        first_features: Callable[[], Floats] | None = None,
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.options, self.mel, self.sampler, self.parts = options, mel, sampler, parts
        self.first_features = first_features
        self.initial_tokens = self._initial_prompt()
        self.decode = self._decode_options()
        self.tokens: list[int] = list(self.initial_tokens)
        self.seek = 0  # first mel frame of the next window
        self.last_speech = 0.0  # end of the last word, in seconds
        self.context_start = (
            0  # index in `tokens` from which on they are the prompt of the next window
        )
        self.segments: list[Segment] = []
        self.truncated: list[float] = []
        # Empty until it was detected in the first window.
        self.language = known_language(engine, options.decode.language) or ""
        self.language_probability: float | None = None
        self.detected: Language | None = None  # until the first window is decoded
        self._reading = self._windows()
        self.processed_s = 0.0  # end of the last window, in seconds

    def run(self, decoder: Decoder, progress: ProgressCallback) -> Transcript:
        """Transcribe to the end of the audio.

        Args:
            decoder: used by this call only.
            progress: called after every window with the seconds done and the total, or None.

        Raises:
            IncompleteError: the transcription failed after some text was transcribed.
            Interrupted: Ctrl-C was pressed.
        """
        return complete(decoder, self.steps(decoder, progress))

    def steps(self, decoder: Decoder, progress: ProgressCallback) -> Steps[Transcript]:
        """Transcribe as `run` does, but let the caller run the decoder's steps; see `runtime.stepping`."""
        with incomplete_as_error(self.transcript):
            self.detect_language(decoder)
            while (window := self.next_window()) is not None:
                yield from self.decode_window(decoder, window)
                progress(self.done_s, self.mel.duration_s)
        return self.transcript()

    def detect_language(self, decoder: Decoder) -> None:
        """Detect the language in the first window if it is not known: `language` is empty."""
        if not self.language:
            self.detected = self._spoken_language(decoder)
            self.language = self.detected.code
            self.language_probability = self.detected.probability

    def next_window(self) -> SessionWindow | None:
        """Read the next window; None: the end of the audio. The window before it has been decoded."""
        return next(self._reading, None)

    def decode_window(self, decoder: Decoder, window: SessionWindow) -> Steps[None]:
        """Decode a window, keep its segments, and set where the next window begins."""
        yield from self._window(decoder, window.seek, window.mel, window.n_frames)
        self.processed_s = (window.seek + window.n_frames) / FRAMES_PER_SECOND

    @property
    def done_s(self) -> float:
        """Seconds of the audio that are done: the next window begins there."""
        return min(self.seek / FRAMES_PER_SECOND, self.processed_s)

    def transcript(self) -> Transcript:
        """Return the transcript so far."""
        return Transcript(
            text=self.tokenizer.decode(self.tokens[len(self.initial_tokens) :]).strip(),
            segments=tuple(self.segments),
            language=self.language,
            duration_s=self.mel.duration_s or self.processed_s,
            truncated=tuple(self.truncated),
            language_probability=self.language_probability,
        )

    def _spoken_language(self, decoder: Decoder) -> "Language":
        """Return the language of the audio, detected in the first window if none is given."""
        return spoken_language(decoder, self.options.decode.language, self.mel, 0)

    def _windows(self) -> Iterator[SessionWindow]:
        """Yield each window. The next one is read when the one before it was decoded."""
        for start, end in self.parts:
            self.seek = max(start, self.seek)
            while end is None or self.seek < end:
                mel, n_frames = self.mel.window(self.seek)
                n_frames = min(n_frames, self.engine.audio_frames)
                if end is not None:
                    n_frames = min(n_frames, end - self.seek)
                if n_frames == 0:
                    return
                mel[:, n_frames:] = 0  # openai-whisper pads the spectrogram, not the samples
                yield SessionWindow(self.seek, mel, n_frames)

    def _window(self, decoder: Decoder, seek: int, mel: Floats, n_frames: int) -> Steps[None]:
        options = replace(self.decode, language=self.language, prompt=self._prompt())
        decoded, ratio = yield from decoding_with_fallback(
            decoder,
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
        used, complete = self._segments_of(decoded, n_frames)
        if not decoded.ended and used == complete:  # an incomplete segment is decoded again
            self.truncated.append(seek / FRAMES_PER_SECOND)
        segments = self._new_segments(used, seek, decoded, ratio)
        kept = KeptSegments(tuple(segments), seek + used.advance)
        if self.options.word_timestamps:
            kept = self._with_words(decoder, segments, kept.seek, used, seek, n_frames)
        # Always advance: openai-whisper would decode the same window again without end.
        self.seek = kept.seek if kept.seek > seek else seek + n_frames
        if not kept.restart:
            self._keep([_cleared(segment) for segment in kept.segments], decoded)

    def _segments_of(
        self, decoded: Decoded, n_frames: int
    ) -> tuple[SegmentedWindow, SegmentedWindow]:
        """Return the segments of a window that are used, and all of them."""
        begin = self.engine.generation.timestamp_begin
        complete = split_segments(decoded.tokens, begin, n_frames)
        if self.engine.window is not None and n_frames == self.engine.audio_frames:
            return drop_unreliable_end(complete, begin, n_frames), complete
        return complete, complete

    def _features(self, mel: Floats) -> Floats:
        """Return the features (T, d) of a window (n_mels, 2T). The first one may already be encoded."""
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
        decoder: Decoder,
        segments: list[Segment],
        next_seek: int,
        used: SegmentedWindow,
        seek: int,
        n_frames: int,
    ) -> KeptSegments:
        """Return the window's segments with words, and where the next window begins by their times."""
        end = self.engine.generation.end_of_text
        text = [token for segment in segments for token in segment.tokens if token < end]
        timings = align_words(
            decoder,
            self.tokenizer,
            text,
            language=self.language,
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
        if spoken_until is not None and spoken_until > window.start_s and not used.closed:
            next_seek = round(spoken_until * FRAMES_PER_SECOND)
            if threshold is not None and window.end_s - spoken_until <= threshold:
                next_seek = seek + n_frames
        kept = KeptSegments(tuple(segments), next_seek)
        if threshold is not None:
            kept = skip_hallucinations(segments, window, next_seek, self.last_speech, threshold)
        if not kept.restart and (last := _spoken_until(kept.segments)) is not None:
            self.last_speech = last
        return kept

    def _keep(self, segments: list[Segment], decoded: Decoded) -> None:
        """Append segments to the transcript, and decide whether the next window's prompt has their text."""
        self.segments += segments
        for segment in segments:
            self.tokens += segment.tokens
        if (
            not self.options.uses_previous_text(self.engine.window)
            or decoded.temperature > MAX_CONTEXT_TEMPERATURE
        ):
            self.context_start = len(self.tokens)

    def _new_segments(
        self, used: SegmentedWindow, seek: int, decoded: Decoded, ratio: float
    ) -> list[Segment]:
        """Return the segments of a window. Their tokens follow each other, from the first one on."""
        segments, done = list[Segment](), 0
        for segment in used.segments:
            logprobs = decoded.logprobs[done : done + len(segment.tokens)]
            segments.append(self._segment(segment, seek, decoded, ratio, logprobs))
            done += len(segment.tokens)
        return segments

    def _segment(
        self,
        segment: WindowSegment,
        seek: int,
        decoded: Decoded,
        ratio: float,
        logprobs: tuple[float, ...],
    ) -> Segment:
        """Return a segment with times from the beginning of the audio."""
        start = seek / FRAMES_PER_SECOND
        return Segment(
            start=start + segment.start_s,
            end=start + segment.end_s,
            text=self.tokenizer.decode(segment.tokens),
            tokens=segment.tokens,
            avg_logprob=decoded.avg_logprob,
            no_speech_prob=decoded.no_speech_prob,
            temperature=decoded.temperature,
            compression_ratio=ratio,
            seek=seek,
            logprobs=logprobs,
        )

    def _initial_prompt(self) -> list[int]:
        """Return the tokens of the initial prompt, and warn if it is too long."""
        room = prompt_room(self.engine.dims)
        return usable_tokens(
            self.tokenizer, "the initial prompt", self.options.initial_prompt, room
        )

    def _decode_options(self) -> DecodeOptions:
        """Return the decoding options of a window, without the prompt."""
        options, dims = self.options.decode, self.engine.dims
        room = prefix_room(dims, options)
        if self.options.prefix:
            # Without a limit, all tokens are used, and more than the decoder has are an error.
            tokens = usable_tokens(
                self.tokenizer, "the prefix", self.options.prefix, room or dims.n_text_ctx
            )
            return replace(options, prefix=tuple(tokens))
        warn_if_truncated(self.tokenizer, "the prefix", options.prefix, room or len(options.prefix))
        return options

    def _prompt(self) -> tuple[int, ...]:
        """Return the prompt of the next window: initial prompt and previous text."""
        if not self.options.carry_initial_prompt:
            return tuple(self.tokens[self.context_start :])
        room = prompt_room(self.engine.dims) - len(self.initial_tokens)
        recent = self.tokens[max(len(self.initial_tokens), self.context_start) :]
        return (*self.initial_tokens, *recent[-room:])


def usable_tokens(tokenizer: Tokenizer, name: str, text: str, room: int) -> list[int]:
    """Return the tokens of a text with a space before it, and warn if there are more than `room`.

    Of a text that is far longer, only an end is encoded that has more than `room` tokens.

    Args:
        tokenizer: of the bundle.
        name: what the text is, for the warning.
        text: an empty one has no tokens.
        room: how many tokens are used: the last ones.
    """
    text = text.strip()
    if not text:
        return []
    end = tokenizer.end_of(f" {text}", room + 1)
    tokens = tokenizer.encode(end)
    warn_if_truncated(tokenizer, name, tokens, room, before=f" {text}"[: -len(end)])
    return tokens


def warn_if_truncated(
    tokenizer: Tokenizer, name: str, tokens: Sequence[int], room: int, before: str = ""
) -> None:
    """Warn with the unused beginning of a text if it has more than `room` tokens.

    Args:
        tokenizer: of the bundle.
        name: what the text is.
        tokens: of the text, or of its end.
        room: how many are used.
        before: text before the tokens, which was not encoded.
    """
    if len(tokens) <= room:
        return
    count = f"more than {len(tokens)}" if before else len(tokens)
    lost = (before[: MAX_QUOTED + 2] or tokenizer.decode(tokens[:-room])).strip()
    quoted = lost if len(lost) <= MAX_QUOTED else f"{lost[:MAX_QUOTED]}…"
    warnings.warn(
        f"{name} has {count} tokens, of which the last {room} are used; "
        f"its beginning is not used: {quoted}",
        TruncatedPromptWarning,
        stacklevel=2,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Language:
    """The language of the audio, and the window that was encoded to detect it."""

    code: str
    probability: float | None = None  # among all languages; None: it was not detected
    encoded: tuple[Floats, Floats] | None = None  # window (n_mels, 2T), features (T, d)


def spoken_language(decoder: Decoder, asked: str | None, mel: Mel, start: int) -> Language:
    """Return the language: the given one, the checkpoint's own, or the one detected in a window.

    In the window for the detection, silence follows the end of the audio, as in openai-whisper. In the
    windows that are decoded, openai-whisper sets the spectrogram to 0 there.

    Args:
        decoder: state of the call.
        asked: code or name of the language; None: detect it.
        mel: spectrogram of the audio.
        start: first mel frame of the window for the detection.
    """
    engine = decoder.engine
    if code := known_language(engine, asked):
        return Language(code)
    window, _ = mel.window(start)
    window[:, engine.audio_frames :] = 0
    features = engine.encode(window)
    decoder.start_window(features)
    return Language(*detect_language(decoder), (window, features))


def known_language(engine: Engine, asked: str | None) -> str | None:
    """Return the language that is known without audio: the given one, or the checkpoint's own."""
    if asked is not None:
        return language_code(asked, engine.generation.languages)
    return own_language(engine.generation)


def _cleared(segment: Segment) -> Segment:
    """Return the segment, without text and words if its duration is 0 or its text is blank."""
    if segment.start != segment.end and segment.text.strip():
        return segment
    return replace(segment, text="", tokens=(), words=(), logprobs=())


def _spoken_until(segments: Sequence[Segment]) -> float | None:
    """Return the end of the last word in seconds; without words, the end of the last segment."""
    for segment in reversed(segments):
        if segment.words:
            return segment.words[-1].end
    return segments[-1].end if segments else None


def clip_frames(clips: tuple[float, ...]) -> list[tuple[int, int | None]]:
    """Return start and end of each clip in mel frames; without clips, one part with all audio."""
    points: list[int | None] = [round(time * FRAMES_PER_SECOND) for time in clips] or [0]
    if len(points) % 2:
        points.append(None)
    return [(start or 0, end) for start, end in zip(points[::2], points[1::2], strict=True)]
