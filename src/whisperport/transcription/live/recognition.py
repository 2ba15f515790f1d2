"""Decode the most recent audio of a live transcription in one pass of the model, with word timestamps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from whisperport.runtime import (
    Decoded,
    Decoder,
    Steps,
    WindowSegment,
    decoding_with_fallback,
    is_silence,
    is_trusted,
    split_segments,
)
from whisperport.runtime.segments.alignment import align_words
from whisperport.runtime.segments.words import add_words
from whisperport.speech.audio import FRAMES_PER_SECOND, HOP_LENGTH, SAMPLE_RATE
from whisperport.speech.audio.mel import N_FFT, mel_log_power, to_whisper_scale
from whisperport.speech.text import Segment, Tokenizer
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.transcription.live.agreement import HypothesisWord
from whisperport.transcription.session import match_of

Floats = NDArray[np.float32]
MIN_FRAMES = 10  # mel frames of 10 ms; shorter audio has no word

T = TypeVar("T")


class Buffer:
    """The most recent samples of a stream, and their spectrogram.

    Args:
        n_mels: number of mel bands of the model.
        n_frames: mel frames of 10 ms in a window of the model.
        audio_frames: how many of these frames may have audio.

    Attributes:
        start: mel frame of the stream at which the buffer begins.
    """

    def __init__(self, n_mels: int, n_frames: int, audio_frames: int) -> None:
        self._n_mels, self._n_frames = n_mels, n_frames
        self._capacity = audio_frames * HOP_LENGTH
        self._samples = np.empty(0, np.float32)
        self._peak = -np.inf  # log10 power of the loudest bin so far
        self.start = 0

    @property
    def room(self) -> int:
        """Number of samples that can be added."""
        return self._capacity - self._samples.size

    @property
    def frames(self) -> int:
        """Number of complete mel frames in the buffer."""
        return self._samples.size // HOP_LENGTH

    @property
    def start_s(self) -> float:
        """Start of the buffer in the stream, in seconds."""
        return self.start / FRAMES_PER_SECOND

    @property
    def end_s(self) -> float:
        """End of the buffer in the stream, in seconds."""
        return self.start_s + self._samples.size / SAMPLE_RATE

    def add(self, samples: Floats) -> None:
        """Append samples (n,) float32, n <= `room`."""
        self._samples = np.concatenate([self._samples, samples])

    def cut(self, before_s: float) -> None:
        """Remove the audio before `before_s` seconds of the stream, at most all of the buffer."""
        frames = min(round(before_s * FRAMES_PER_SECOND) - self.start, self.frames)
        if frames > 0:
            self.start += frames
            self._samples = self._samples[frames * HOP_LENGTH :].copy()

    def mel(self) -> Floats:
        """Compute the spectrogram on Whisper's scale, (n_mels, n_frames). Needs at least 201 samples.

        As in openai-whisper, samples are reflected before the beginning, and the spectrogram is 0 after the
        audio.
        """
        before = np.pad(self._samples, (N_FFT // 2, 0), mode="reflect")
        n_samples = (self._n_frames - 1) * HOP_LENGTH + N_FFT
        samples = np.pad(before, (0, max(n_samples - before.size, 0)))[:n_samples]
        power = mel_log_power(samples, self._n_mels)
        self._peak = max(self._peak, float(power.max()))
        mel = to_whisper_scale(power, self._peak)
        mel[:, self.frames :] = 0
        return mel


class DecodingRunner(Protocol):
    """Runs a decoding, and returns its result: on the caller's thread, or where a scheduler wants it."""

    def __call__(self, start: Callable[[Decoder], Steps[T]], /) -> T:
        """Call `start` with the decoder to use, and run the steps of the decoding that it returns."""
        ...


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """The text of a buffer in one pass. It has at least one word."""

    words: tuple[HypothesisWord, ...]
    complete: int  # number of words in segments that have ended
    decoded: Decoded
    ratio: float  # compression ratio of the text

    @property
    def sentences(self) -> list[list[HypothesisWord]]:
        """The words of each segment."""
        sentences: list[list[HypothesisWord]] = []
        for word in self.words:
            if word.starts_segment:
                sentences.append([])
            sentences[-1].append(word)
        return sentences


def recognize(
    run: DecodingRunner,
    transcriber: Transcriber,
    buffer: Buffer,
    options: TranscribeOptions,
    prompt: tuple[int, ...],
    last_speech: float,
) -> Hypothesis | None:
    """Decode a buffer.

    Args:
        run: runs the decoding.
        transcriber: the loaded bundle.
        buffer: the most recent audio.
        options: transcription options.
        prompt: token ids of the text before the buffer.
        last_speech: end of the last certain word, in seconds.

    Returns:
        The words of the buffer; None if it has none.
    """
    if buffer.frames < MIN_FRAMES:
        return None
    options = replace(options, decode=replace(options.decode, prompt=prompt))
    return run(partial(_recognition, transcriber, buffer, buffer.mel(), options, last_speech))


def _recognition(
    transcriber: Transcriber,
    buffer: Buffer,
    mel: Floats,
    options: TranscribeOptions,
    last_speech: float,
    decoder: Decoder,
) -> Steps[Hypothesis | None]:
    """Decode the spectrogram of a buffer."""
    engine, text_of = transcriber.engine, transcriber.tokenizer.decode_with_special_tokens
    full = engine.dims.n_audio_ctx
    for positions in sorted({engine.positions_for(buffer.frames), full}):
        decoded, ratio = yield from decoding_with_fallback(
            decoder,
            engine.encode(mel[:, : 2 * positions]),
            options.decode,
            options.temperatures if positions == full else options.temperatures[:1],
            options.thresholds,
            text_of,
        )
        if is_trusted(decoded, ratio, options.thresholds, engine):
            break
    if is_silence(decoded, options.thresholds):
        return None
    segments, n_complete = _segments_of(
        decoded, transcriber.engine.generation.timestamp_begin, buffer
    )
    ends = accumulate(len(segment.tokens) for segment in segments)
    matches = [match_of(decoded.verdicts, end) for end in ends]
    segment_words = [
        # Segments with a duration of 0 are dropped, as in the transcription of a file.
        segment.words or () if segment.end > segment.start else ()
        for segment in _with_words(
            decoder, transcriber.tokenizer, buffer, options, decoded, segments, last_speech
        )
    ]
    words = tuple(
        HypothesisWord(word, i == 0, match)
        for words, match in zip(segment_words, matches, strict=True)
        for i, word in enumerate(words)
    )
    n_words = sum(len(words) for words in segment_words[:n_complete])
    return Hypothesis(words, n_words, decoded, ratio) if words else None


def _segments_of(decoded: Decoded, begin: int, buffer: Buffer) -> tuple[list[WindowSegment], int]:
    """Return the segments of a buffer, including one that has not ended, and the number that have ended.

    The transcription of a file drops the segment that has not ended, because the next window begins with
    it.
    """
    split = split_segments(decoded.tokens, begin, buffer.frames)
    rest = decoded.tokens[sum(len(segment.tokens) for segment in split.segments) :]
    segments = list(split.segments)
    if rest:
        start, end = split.advance / FRAMES_PER_SECOND, buffer.frames / FRAMES_PER_SECOND
        segments.append(WindowSegment(min(start, end), end, rest))
    return segments, len(split.segments)


def _with_words(
    decoder: Decoder,
    tokenizer: Tokenizer,
    buffer: Buffer,
    options: TranscribeOptions,
    decoded: Decoded,
    parts: list[WindowSegment],
    last_speech: float,
) -> list[Segment]:
    """Return the segments with word timestamps, in time from the beginning of the stream."""
    end = decoder.engine.generation.end_of_text
    timings = align_words(
        decoder,
        tokenizer,
        [token for token in decoded.tokens if token < end],
        language=decoded.language,
        task=options.decode.task,
        n_frames=buffer.frames,
    )
    segments = [
        Segment(
            start=buffer.start_s + part.start_s,
            end=buffer.start_s + part.end_s,
            text=tokenizer.decode(part.tokens),
            tokens=part.tokens,
            seek=buffer.start,
        )
        for part in parts
    ]
    return add_words(
        segments,
        timings,
        end_of_text=end,
        last_speech=last_speech,
        prepended=options.prepend_punctuations,
        appended=options.append_punctuations,
    )
