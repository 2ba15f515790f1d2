"""Transcribe audio, or parts of it, window by window; timestamps decide where the next window begins.

Source: openai/whisper@v20250625, whisper/transcribe.py.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from whisperport.program.dims import SECONDS_PER_POSITION
from whisperport.runtime import (
    Decoded,
    DecodeOptions,
    Decoder,
    Engine,
    Floats,
    SegmentedWindow,
    Steps,
    TokenSampler,
    complete,
    decoding_with_fallback,
    detect_language,
    is_silence,
    is_trusted,
    split_segments,
)
from whisperport.runtime.decoding.decode import (
    own_language,
    prefix_room,
    prompt_room,
    suppressed_ids,
)
from whisperport.runtime.decoding.grammar import compiled_grammar
from whisperport.runtime.decoding.phrases import compiled
from whisperport.runtime.decoding.search import Verdict
from whisperport.runtime.segments.alignment import align_words
from whisperport.runtime.segments.hallucinations import (
    KeptSegments,
    WindowPosition,
    skip_hallucinations,
)
from whisperport.runtime.segments.segments import drop_unreliable_end
from whisperport.runtime.segments.words import add_words
from whisperport.speech.audio import FRAMES_PER_SECOND
from whisperport.speech.text import Match, Segment, Tokenizer, language_code
from whisperport.system.progress import ProgressCallback
from whisperport.transcription.transcribe_options import TranscribeOptions
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
class Language:
    """The language of the audio, and the window that was encoded to detect it."""

    code: str  # empty: not detected yet
    probability: float | None = None  # among all languages; None: it was not detected
    encoded: tuple[Floats, Floats] | None = None  # spectrogram (n_mels, 2T), features (T, d)


@dataclass(frozen=True, slots=True, eq=False)
class SessionWindow:
    """A window of the audio that was read and not yet decoded."""

    seek: int  # its first mel frame
    mel: Floats  # (n_mels, 2T); 0 after the end of the part
    n_frames: int  # number of frames with audio

    @property
    def start_s(self) -> float:
        """Time of its first frame in seconds."""
        return self.seek / FRAMES_PER_SECOND


@dataclass(slots=True, eq=False)
class WindowState:
    """All that changes from window to window: the text so far, and where the next window begins."""

    language: Language  # with the encoded window until the first one is decoded
    tokens: list[int]  # of the initial prompt, and then of the segments
    context_start: int = 0  # index in `tokens` from which on they are the next window's prompt
    segments: list[Segment] = field(default_factory=list)
    truncated: list[float] = field(default_factory=list)  # as in `Transcript`
    last_speech: float = 0.0  # end of the last word, in seconds
    part: int = 0  # index of the part of the audio in which the next window begins
    seek: int = 0  # first mel frame of the next window
    processed_s: float = 0.0  # end of the last window, in seconds

    @property
    def done_s(self) -> float:
        """Seconds of the audio that are done: the next window begins there."""
        return min(self.seek / FRAMES_PER_SECOND, self.processed_s)


class Session:
    """The transcription of one audio file. All attributes but those of `state` are constant.

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
        self.initial_tokens = tuple(self._initial_prompt())
        self.decode = self._decode_options()
        language = Language(known_language(engine, options.decode.language) or "")
        self.state = WindowState(language, list(self.initial_tokens))

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
                progress(self.state.done_s, self.mel.duration_s)
        return self.transcript()

    def detect_language(self, decoder: Decoder) -> None:
        """Detect the language in the first window if it is not known: its code is empty."""
        if not self.state.language.code:
            self.state.language = self._spoken_language(decoder)

    def next_window(self) -> SessionWindow | None:
        """Read the next window; None: the end of the audio. The window before it has been decoded."""
        state = self.state
        while state.part < len(self.parts):
            start, end = self.parts[state.part]
            state.seek = max(start, state.seek)
            if end is not None and state.seek >= end:
                state.part += 1
                continue
            mel, n_frames = self.mel.window(state.seek)
            n_frames = min(n_frames, self.engine.audio_frames)
            if end is not None:
                n_frames = min(n_frames, end - state.seek)
            if n_frames == 0:
                return None
            mel[:, n_frames:] = 0  # openai-whisper pads the spectrogram, not the samples
            return SessionWindow(state.seek, mel, n_frames)
        return None

    def decode_window(self, decoder: Decoder, window: SessionWindow) -> Steps[None]:
        """Decode a window, keep its segments, and set where the next window begins."""
        state, end = self.state, window.seek + window.n_frames
        positions, full = self.engine.positions_for(window.n_frames), self.engine.dims.n_audio_ctx
        decoded, ratio = yield from self._decoding(decoder, window, positions)
        if positions < full and not self._is_trusted(decoded, ratio, window.n_frames):
            positions = full
            decoded, ratio = yield from self._decoding(decoder, window, positions)
        state.language = replace(state.language, encoded=None)
        if is_silence(decoded, self.options.thresholds):
            state.seek = end
        else:
            used, complete = self._segments_of(decoded, window.n_frames)
            if not decoded.ended and used == complete:  # an incomplete segment is decoded again
                state.truncated.append(window.start_s)
            segments = self._new_segments(used, window, decoded, ratio, positions)
            kept = KeptSegments(tuple(segments), window.seek + used.advance)
            if self.options.word_timestamps:
                kept = self._with_words(decoder, kept, used.closed, window)
            # Always advance: openai-whisper would decode the same window again without end.
            state.seek = kept.seek if kept.seek > window.seek else end
            if not kept.restart:
                self._keep([_cleared(segment) for segment in kept.segments], decoded)
        state.processed_s = end / FRAMES_PER_SECOND

    def _decoding(
        self, decoder: Decoder, window: SessionWindow, positions: int
    ) -> Steps[tuple[Decoded, float]]:
        """Decode a window of so many positions: once if it is short, else at each temperature.

        A language that a short window had is detected again in the full one.
        """
        temperatures = self.options.tried_temperatures
        features = self._features(window, positions)
        if positions < self.engine.dims.n_audio_ctx:
            temperatures = temperatures[:1]
        elif (encoded := self.state.language.encoded) and len(encoded[1]) < positions:
            decoder.start_window(features)
            self.state.language = Language(*detect_language(decoder))
        return (
            yield from decoding_with_fallback(
                decoder,
                features,
                replace(self.decode, language=self.state.language.code, prompt=self._prompt()),
                temperatures,
                self.options.thresholds,
                self.tokenizer.decode_with_special_tokens,
                self.sampler,
            )
        )

    def _is_trusted(self, decoded: Decoded, ratio: float, n_frames: int) -> bool:
        """Return whether the text of a short window is used: it is sure, and ends with the audio."""
        if not is_trusted(decoded, ratio, self.options.thresholds, self.engine):
            return False
        used, _ = self._segments_of(decoded, n_frames)
        return used.closed or self.options.decode.without_timestamps

    def transcript(self) -> Transcript:
        """Return the transcript so far."""
        state = self.state
        return Transcript(
            text=self.tokenizer.decode(state.tokens[len(self.initial_tokens) :]).strip(),
            segments=tuple(state.segments),
            language=state.language.code,
            duration_s=self.mel.duration_s or state.processed_s,
            truncated=tuple(state.truncated),
            language_probability=state.language.probability,
        )

    def _spoken_language(self, decoder: Decoder) -> Language:
        """Return the language of the audio, detected in the first window."""
        return spoken_language(decoder, self.options.decode.language, self.mel, 0)

    def _segments_of(
        self, decoded: Decoded, n_frames: int
    ) -> tuple[SegmentedWindow, SegmentedWindow]:
        """Return the segments of a window that are used, and all of them."""
        begin = self.engine.generation.timestamp_begin
        complete = split_segments(decoded.tokens, begin, n_frames)
        if self.engine.window is not None and n_frames == self.engine.audio_frames:
            return drop_unreliable_end(complete, begin, n_frames), complete
        return complete, complete

    def _features(self, window: SessionWindow, positions: int) -> Floats:
        """Return the features (T, d) of T positions of a window. Those of the first may be there."""
        if self.first_features and window.seek == self.parts[0][0]:
            features = self.first_features()
            if len(features) == positions:
                return features
        mel = window.mel[:, : 2 * positions]
        if self.state.language.encoded:
            encoded, features = self.state.language.encoded
            if np.array_equal(encoded, mel):
                return features
        return self.engine.encode(mel)

    def _with_words(
        self, decoder: Decoder, kept: KeptSegments, closed: bool, window: SessionWindow
    ) -> KeptSegments:
        """Return the window's segments with words, and where the next window begins by their times.

        Args:
            decoder: has decoded the window.
            kept: segments without words, and where the next window would begin by their timestamps.
            closed: whether the last segment ends with a timestamp.
            window: the window.
        """
        end, state = self.engine.generation.end_of_text, self.state
        text = [token for segment in kept.segments for token in segment.tokens if token < end]
        timings = align_words(
            decoder,
            self.tokenizer,
            text,
            language=state.language.code,
            task=self.options.decode.task,
            n_frames=window.n_frames,
        )
        segments = add_words(
            list(kept.segments),
            timings,
            end_of_text=end,
            last_speech=state.last_speech,
            prepended=self.options.prepend_punctuations,
            appended=self.options.append_punctuations,
        )
        position = WindowPosition(
            window.start_s,
            window.n_frames / FRAMES_PER_SECOND,
            self.engine.audio_frames / FRAMES_PER_SECOND,
            self.mel.duration_s,
        )
        next_seek, spoken_until = kept.seek, _spoken_until(segments)
        threshold = self.options.hallucination_silence_threshold
        if spoken_until is not None and spoken_until > position.start_s and not closed:
            next_seek = round(spoken_until * FRAMES_PER_SECOND)
            if threshold is not None and position.end_s - spoken_until <= threshold:
                next_seek = window.seek + window.n_frames
        kept = KeptSegments(tuple(segments), next_seek)
        if threshold is not None:
            kept = skip_hallucinations(segments, position, next_seek, state.last_speech, threshold)
        if not kept.restart and (last := _spoken_until(kept.segments)) is not None:
            state.last_speech = last
        return kept

    def _keep(self, segments: list[Segment], decoded: Decoded) -> None:
        """Append segments to the transcript, and decide whether the next window's prompt has their text."""
        state = self.state
        state.segments += segments
        for segment in segments:
            state.tokens += segment.tokens
        if (
            not self.options.uses_previous_text(self.engine.window)
            or decoded.temperature > MAX_CONTEXT_TEMPERATURE
        ):
            state.context_start = len(state.tokens)

    def _new_segments(
        self,
        used: SegmentedWindow,
        window: SessionWindow,
        decoded: Decoded,
        ratio: float,
        positions: int,
    ) -> list[Segment]:
        """Return the segments of a window, with times from the beginning of the audio.

        Their tokens follow each other, from the first one of the window on.
        """
        segments, n_tokens = list[Segment](), 0
        is_full = positions == self.engine.dims.n_audio_ctx
        window_s = None if is_full else positions * SECONDS_PER_POSITION
        for segment in used.segments:
            end = n_tokens + len(segment.tokens)
            segments.append(
                Segment(
                    start=window.start_s + segment.start_s,
                    end=window.start_s + segment.end_s,
                    text=self.tokenizer.decode(segment.tokens),
                    tokens=segment.tokens,
                    avg_logprob=decoded.avg_logprob,
                    no_speech_prob=decoded.no_speech_prob,
                    temperature=decoded.temperature,
                    compression_ratio=ratio,
                    seek=window.seek,
                    window_s=window_s,
                    logprobs=decoded.logprobs[n_tokens:end],
                    match=match_of(decoded.verdicts, end),
                )
            )
            n_tokens = end
        return segments

    def _initial_prompt(self) -> list[int]:
        """Return the tokens of the initial prompt, and warn if it is too long."""
        room = prompt_room(self.engine.dims)
        return usable_tokens(
            self.tokenizer, "the initial prompt", self.options.initial_prompt, room
        )

    def _decode_options(self) -> DecodeOptions:
        """Return the decoding options of a window, without the prompt."""
        options = with_words(self.options, self.engine, self.tokenizer)
        dims = self.engine.dims
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
        state, n_initial = self.state, len(self.initial_tokens)
        if not self.options.carry_initial_prompt:
            return tuple(state.tokens[state.context_start :])
        room = prompt_room(self.engine.dims) - n_initial
        recent = state.tokens[max(n_initial, state.context_start) :]
        return (*self.initial_tokens, *recent[-room:])


def with_words(options: TranscribeOptions, engine: Engine, tokenizer: Tokenizer) -> DecodeOptions:
    """Return the decoding options with the phrases and the grammar of the transcription as tokens.

    Raises:
        UsageError: a phrase or a text of the grammar cannot be decoded.
    """
    if not options.phrases and not options.grammar:
        return options.decode
    never = suppressed_ids(engine.generation, engine.dims, options.decode.suppress_tokens)
    return replace(
        options.decode,
        phrases=compiled(tokenizer, options.phrases, frozenset(never)),
        grammar=compiled_grammar(tokenizer, options.grammar, frozenset(never)),
        grammar_threshold=options.grammar_threshold,
    )


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


def spoken_language(decoder: Decoder, language: str | None, mel: Mel, start: int) -> Language:
    """Return the language: the given one, the checkpoint's own, or the one detected in a window.

    In the window for the detection, silence follows the end of the audio, as in openai-whisper. In the
    windows that are decoded, openai-whisper sets the spectrogram to 0 there; here also in a window that is
    shorter than the checkpoint's, so that it is encoded once for both.

    Args:
        decoder: state of the call.
        language: code or name of the language; None: detect it.
        mel: spectrogram of the audio.
        start: first mel frame of the window for the detection.
    """
    engine = decoder.engine
    if code := known_language(engine, language):
        return Language(code)
    window, n_frames = mel.window(start)
    positions = engine.positions_for(n_frames)
    if positions < engine.dims.n_audio_ctx:
        window = window[:, : 2 * positions]
        window[:, n_frames:] = 0
    window[:, engine.audio_frames :] = 0
    features = engine.encode(window)
    decoder.start_window(features)
    return Language(*detect_language(decoder), (window, features))


def known_language(engine: Engine, language: str | None) -> str | None:
    """Return the language that is known without audio: the given one, or the checkpoint's own."""
    if language is not None:
        return language_code(language, engine.generation.languages)
    return own_language(engine.generation)


def _cleared(segment: Segment) -> Segment:
    """Return the segment, without text and words if it is blank, of no duration, or in no grammar."""
    is_refused = segment.match is not None and not segment.match.matched
    if segment.start != segment.end and segment.text.strip() and not is_refused:
        return segment
    match = segment.match if is_refused else None
    return replace(segment, text="", tokens=(), words=(), logprobs=(), match=match)


def match_of(verdicts: Sequence[Verdict], end: int) -> Match | None:
    """Return the verdict about the segment that ends behind so many tokens of its window, if any."""
    for verdict in verdicts:
        if verdict.end == end:
            return Match(verdict.matched, verdict.score)
    return None


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
