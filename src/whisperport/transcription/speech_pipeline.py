"""Transcribe chunks of speech as if each were a separate audio file: a pipeline in bounded memory.

    calling thread    finds speech ─► cuts chunks ─► computes the spectrogram of each, in order
    encoder threads   find the maximum of the spectrogram ─► encode the first window of the next chunks
    decoder threads   decode earlier chunks with the same runners at the same time
    calling thread    joins the results in order

Each worker has one encoder thread and one decoder thread; with a batch, that one decodes several chunks
together. The text does not depend on the number of workers or on the batch, because
no chunk uses the result of another.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from threading import Event
from typing import Protocol, TypeVar

import numpy as np

from whisperport.errors import IncompleteError, Interrupted, UsageError
from whisperport.runtime import BatchExecutor, Decoder, Engine, Floats, Steps, TokenSampler
from whisperport.speech.audio import (
    FRAMES_PER_SECOND,
    SAMPLE_RATE,
    AudioStream,
    MelWindows,
    Span,
    VadOptions,
    cut_chunks,
    fill_windows,
    speech_spans,
)
from whisperport.speech.text import Segment, Tokenizer
from whisperport.system.progress import ProgressCallback
from whisperport.transcription.decoders import texts_together
from whisperport.transcription.session import Language, Mel, Session, spoken_language
from whisperport.transcription.transcribe_options import TranscribeOptions
from whisperport.transcription.transcript import Transcript, incomplete_as_error

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Parts of the audio in order that one window holds, without the silence between them.

        audio   ──[ part ]────────[ part ]──[ part ]──►
        chunk     [ part ][ part ][ part ]

    Times in the chunk are those of the audio in the first part. In each later part they are smaller, by the
    silence that was left out before it.

    Attributes:
        parts: at least one.
        pad: mel frames without speech at both ends of each part.
    """

    parts: tuple[Span, ...]
    pad: int = 0

    @property
    def start(self) -> int:
        """First mel frame, in the chunk and in the audio."""
        return self.parts[0].start

    @property
    def n_frames(self) -> int:
        """Length in mel frames."""
        return sum(part.n_frames for part in self.parts)

    def in_audio(self, transcript: Transcript) -> Transcript:
        """Return a transcript of the chunk with times in the audio."""
        return replace(
            transcript,
            segments=tuple(self._in_audio(segment) for segment in transcript.segments),
            truncated=tuple(self.times(start, start)[0] for start in transcript.truncated),
        )

    def times(self, start: float, end: float) -> tuple[float, float]:
        """Return the times in the audio of a text, in seconds.

        The model often ends one text and begins the next at the same time in the silence between two parts.
        A text that ends there belongs to the earlier part, and one that begins there to the later part.

        Args:
            start: time in the chunk, in seconds.
            end: not before `start`.
        """
        first, last = (round(time * FRAMES_PER_SECOND) for time in (start, end))
        from_start, from_end = self._left_out(first + self.pad), self._left_out(last - self.pad)
        if first + from_start > last + from_end:  # the text is in the silence
            from_start, from_end = self._left_out(first), self._left_out(last)
        return start + from_start / FRAMES_PER_SECOND, end + from_end / FRAMES_PER_SECOND

    def _left_out(self, frame: int) -> int:
        """Return how many frames of the audio before a frame of the chunk are not in the chunk."""
        at = self.start  # first frame of a part in the chunk
        for part in self.parts[:-1]:
            if frame < at + part.n_frames:
                return part.start - at
            at += part.n_frames
        return self.parts[-1].start - at

    def _in_audio(self, segment: Segment) -> Segment:
        start, end = self.times(segment.start, segment.end)
        words = segment.words
        if words is not None:
            timed = [(word, *self.times(word.start, word.end)) for word in words]
            words = tuple(replace(word, start=begin, end=stop) for word, begin, stop in timed)
        seek = segment.seek + self._left_out(segment.seek)
        return replace(segment, start=start, end=end, seek=seek, words=words)


Result = tuple[Chunk, Transcript]


class ChunkMel:
    """The spectrogram of one chunk that fits into a window, in memory, with silence after it.

    Args:
        mel: of the audio; not yet read beyond the beginning of the chunk.
        chunk: fits into a window.
        n_frames: of a window.
    """

    def __init__(self, mel: MelWindows, chunk: Chunk, n_frames: int) -> None:
        self.duration_s = mel.duration_s
        self._start = chunk.start
        parts = []
        for part in chunk.parts:
            frames, n_audio = mel.window(part.start, part.n_frames)
            parts.append(frames[:, :n_audio])  # the last part may end after the audio
        self._n_frames = sum(part.shape[1] for part in parts)
        silence = np.zeros((len(frames), n_frames - self._n_frames), np.float32)
        self.frames: Floats = np.concatenate([*parts, silence], axis=1)  # (n_mels, n_frames)

    def window(self, start: int) -> tuple[Floats, int]:
        offset = start - self._start
        frames = np.zeros_like(self.frames)
        frames[:, : frames.shape[1] - offset] = self.frames[:, offset:]
        return frames, max(self._n_frames - offset, 0)


class DecodingThreads(Protocol):
    """Runs decodings on threads of its own."""

    def submit(self, start: Callable[[Decoder], Steps[T]]) -> Future[T]:
        """Schedule a decoding: `start` is called with the decoder to use and returns it."""
        ...

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        """Wait for all decodings; with `cancel_futures`, only for those that have begun."""
        ...


class StoppableMel:
    """A spectrogram whose `window` raises KeyboardInterrupt once `stop` is set.

    Ctrl-C interrupts only the main thread. This class stops the other threads.
    """

    def __init__(self, mel: Mel, stop: Event) -> None:
        self._mel, self._stop = mel, stop

    @property
    def duration_s(self) -> float | None:
        return self._mel.duration_s

    def window(self, start: int) -> tuple[Floats, int]:
        if self._stop.is_set():
            raise KeyboardInterrupt
        return self._mel.window(start)


class ChunkSession(Session):
    """The transcription of one chunk, with times in the audio; for the arguments see `Session`."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        options: TranscribeOptions,
        mel: Mel,
        sampler: TokenSampler | None,
        chunk: Chunk,
        first_features: Callable[[], Floats] | None,
    ) -> None:
        all_of_it = [(chunk.start, chunk.start + chunk.n_frames)]
        super().__init__(engine, tokenizer, options, mel, sampler, all_of_it, first_features)
        self._chunk = chunk

    def transcript(self) -> Transcript:
        return self._chunk.in_audio(super().transcript())


class ChunkedTranscription:
    """Transcribes the chunks of one audio file with a decoder for each worker. Call `run` once.

    Args:
        engine: the loaded programs.
        tokenizer: of the bundle.
        options: transcription options, with the number of workers.
        vad: how speech is detected and cut into chunks.
        sampler: see `Transcriber.transcribe`; needs one worker.
        decoders: runs the decodings, and is shut down at the end. None: threads of its own.

    Raises:
        UsageError: `sampler` is set and there are several workers.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        options: TranscribeOptions,
        vad: VadOptions,
        sampler: TokenSampler | None,
        decoders: DecodingThreads | None = None,
    ) -> None:
        if sampler is not None and options.workers > 1:
            raise UsageError(
                "`sampler` requires one worker",
                why="several workers would share its random numbers in an unpredictable order",
                hint="do not set `sampler`, or do not set `workers`",
            )
        self._engine, self._tokenizer = engine, tokenizer
        self._options, self._vad, self._sampler = options, vad, sampler
        together = texts_together(engine, options, sampler)
        self._ahead = 2 * options.workers * together  # chunks that are submitted ahead
        self._encoders = ThreadPoolExecutor(options.workers, "encoder")
        self._decoders = decoders or BatchExecutor(engine, together, options.workers)
        self._stop = Event()
        self._results: list[Transcript] = []
        self._stream: AudioStream | None = None
        self._language = Language("")

    def run(
        self, stream: AudioStream, open_mel: Callable[..., MelWindows], progress: ProgressCallback
    ) -> Transcript:
        """Transcribe an audio file that is open twice.

        Args:
            stream: the samples, in which speech is detected ahead of the transcription.
            open_mel: returns the spectrogram that is transcribed. It is called with `is_stopped`.
            progress: called after every chunk with the seconds done and the total, or None.

        Raises:
            AudioError: the audio cannot be read.
            IncompleteError: the transcription failed after some text was transcribed.
            Interrupted: Ctrl-C was pressed, or `stop` was called.
        """
        self._stream = stream
        try:
            mel, chunks = self._opened(open_mel, self._chunks(stream))
        except BaseException:
            self._end()
            raise
        try:
            return self._transcribed(mel, chunks, progress)
        finally:
            mel.close()

    def stop(self) -> None:
        """End `run` soon, from another thread or from its progress callback."""
        self._stop.set()

    def transcript(self) -> Transcript:
        """Return the transcript of the chunks so far."""
        decoded = self._stream.n_decoded if self._stream else 0
        return _joined(self._results, self._language, decoded / SAMPLE_RATE)

    def _opened(
        self, open_mel: Callable[..., MelWindows], chunks: Iterator[Chunk]
    ) -> tuple[MelWindows, Iterator[Chunk]]:
        """Open the spectrogram in an encoder thread and find chunks meanwhile; return both."""
        opening = self._encoders.submit(open_mel, is_stopped=self._stop.is_set)
        opened_chunks: list[Chunk] = []
        try:
            while not opening.done() and (chunk := next(chunks, None)):
                opened_chunks.append(chunk)
        except Exception as error:  # the chunks before it are transcribed
            chunks = _failing(error)
        return opening.result(), chain(opened_chunks, chunks)

    def _transcribed(
        self, mel: MelWindows, chunks: Iterator[Chunk], progress: ProgressCallback
    ) -> Transcript:
        first = next(chunks, None)
        decode = self._options.decode
        start = first.start if first else 0
        spoken = spoken_language(Decoder(self._engine), decode.language, mel, start)
        self._language = replace(spoken, encoded=None)  # the first chunk is encoded again
        self._options = replace(self._options, decode=replace(decode, language=spoken.code))

        def report(chunk: Chunk) -> None:
            progress(chunk.parts[-1].end / FRAMES_PER_SECOND, mel.duration_s)

        with incomplete_as_error(self.transcript):
            self._gather(self._submitted(mel, chain([first] if first else [], chunks)), report)
        transcript = self.transcript()
        progress(transcript.duration_s, transcript.duration_s)
        return transcript

    def _chunks(self, stream: AudioStream) -> Iterator[Chunk]:
        """Yield the chunks of speech in order."""
        speech, limit = speech_spans(stream, self._vad), self._engine.audio_frames
        pad = round(self._vad.pad_s * FRAMES_PER_SECOND)
        if self._vad.pack:
            parts = cut_chunks(speech, limit, pad=pad, longest_silence=2 * pad)
            return (Chunk(group, pad) for group in fill_windows(parts, limit))
        longest = round(self._vad.max_silence_s * FRAMES_PER_SECOND)
        parts = cut_chunks(speech, limit, pad=pad, longest_silence=longest)
        return (Chunk((part,)) for part in parts)

    def _gather(self, futures: Iterable[Future[Result]], report: Callable[[Chunk], None]) -> None:
        """Collect results in order, and submit only as many chunks ahead as the threads need."""
        pending: deque[Future[Result]] = deque()
        try:
            for future in futures:
                pending.append(future)
                if len(pending) > self._ahead:
                    report(self._take(pending))
            while pending:
                report(self._take(pending))
        except KeyboardInterrupt:
            self._end()
            with suppress(Exception, KeyboardInterrupt):  # until the first that is not done
                while pending:
                    self._take(pending)
            raise
        finally:
            self._end()

    def _take(self, pending: deque[Future[Result]]) -> Chunk:
        """Wait for the oldest result and keep it. If it failed, keep its text and drop later results."""
        pending[0].exception()  # waits here, where Ctrl-C loses no result
        future = pending.popleft()
        try:
            chunk, result = future.result()
        except BaseException as error:
            pending.clear()
            if isinstance(error, IncompleteError | Interrupted):
                self._results.append(error.transcript)
                raise error.__cause__ or error from None
            raise
        self._results.append(result)
        return chunk

    def _end(self) -> None:
        """Start no more chunks, and wait for the windows that are being processed."""
        self._stop.set()
        self._encoders.shutdown(wait=False, cancel_futures=True)  # decoders may wait for them
        self._decoders.shutdown(cancel_futures=True)
        self._encoders.shutdown()

    def _submitted(self, mel: MelWindows, chunks: Iterable[Chunk]) -> Iterator[Future[Result]]:
        """Submit chunks and yield their futures. If reading fails, the last future has the exception."""
        try:
            for chunk in chunks:
                if chunk.n_frames <= self._engine.audio_frames:
                    chunk_mel = ChunkMel(mel, chunk, self._engine.dims.n_frames)
                    positions = self._engine.positions_for(chunk.n_frames)
                    features = self._encoders.submit(
                        self._engine.encode, chunk_mel.frames[:, : 2 * positions]
                    )
                    yield self._decoders.submit(
                        partial(self._decoded, chunk, chunk_mel, features.result)
                    )
                else:
                    future = self._decoders.submit(partial(self._decoded, chunk, mel, None))
                    yield future
                    future.exception()  # wait: it reads `mel` meanwhile, which no other thread may
        except Exception as error:
            failed: Future[Result] = Future()
            failed.set_exception(error)
            yield failed

    def _decoded(
        self, chunk: Chunk, mel: Mel, encoded: Callable[[], Floats] | None, decoder: Decoder
    ) -> Steps[Result]:
        """Transcribe one chunk in a decoder thread."""
        session = ChunkSession(
            self._engine,
            self._tokenizer,
            self._options,
            StoppableMel(mel, self._stop),
            self._sampler,
            chunk,
            encoded,
        )
        transcript = yield from session.steps(decoder, lambda _done, _of: None)
        return chunk, transcript


def _failing(error: Exception) -> Iterator[Chunk]:
    """Raise an error instead of yielding a chunk."""
    yield from ()
    raise error


def _joined(results: Sequence[Transcript], language: Language, duration_s: float) -> Transcript:
    """Join the transcripts of chunks in order."""
    return Transcript(
        text=" ".join(result.text for result in results if result.text),
        segments=tuple(segment for result in results for segment in result.segments),
        language=language.code,
        duration_s=duration_s,
        truncated=tuple(start for result in results for start in result.truncated),
        language_probability=language.probability,
    )
