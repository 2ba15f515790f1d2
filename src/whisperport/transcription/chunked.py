"""Transcribe chunks of speech as if each were a separate audio file: a pipeline in bounded memory.

    calling thread    finds speech ─► cuts chunks ─► computes the spectrogram of each, in order
    encoder threads   encode the first window of the next chunks
    decoder threads   decode earlier chunks with the same runners at the same time
    calling thread    joins the results in order

Each worker has one encoder thread and one decoder thread; with a batch there is one decoder thread, which
decodes several chunks together. The text does not depend on the number of workers or on the batch, because
no chunk uses the result of another.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from threading import Event

import numpy as np

from whisperport.audio import (
    FRAMES_PER_SECOND,
    SAMPLE_RATE,
    AudioStream,
    MelWindows,
    Span,
    VadOptions,
    cut_chunks,
    speech_spans,
)
from whisperport.errors import IncompleteError, Interrupted, UsageError
from whisperport.progress import ProgressCallback
from whisperport.runtime import Decoder, Engine, Floats, Steps, TokenSampler
from whisperport.text import Tokenizer
from whisperport.transcription.decoders import DecodingThreads, decoding_threads, texts_together
from whisperport.transcription.incomplete import incomplete_as_error
from whisperport.transcription.options import TranscribeOptions
from whisperport.transcription.session import Mel, Session, spoken_language
from whisperport.transcription.transcript import Transcript

Result = tuple[Span, Transcript]


class ChunkMel:
    """The spectrogram of one chunk that fits into a window, in memory, with silence after it."""

    def __init__(self, mel: MelWindows, chunk: Span) -> None:
        self.duration_s = mel.duration_s
        self._start = chunk.start
        self.frames, n_frames = mel.window(chunk.start)  # the first window, (n_mels, 2T)
        self._n_frames = min(n_frames, chunk.n_frames)
        self.frames[:, self._n_frames :] = 0

    def window(self, start: int) -> tuple[Floats, int]:
        done = start - self._start
        frames = np.zeros_like(self.frames)
        frames[:, : frames.shape[1] - done] = self.frames[:, done:]
        return frames, max(self._n_frames - done, 0)


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


class ChunkedTranscription:
    """Transcribes the chunks of one audio file with a decoder for each worker. Call `run` once.

    Args:
        engine: the loaded programs.
        tokenizer: of the bundle.
        options: transcription options, with the number of workers.
        vad: how speech is detected and cut into chunks.
        sampler: see `Transcriber.transcribe`; needs one worker.

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
        self._ahead = 2 * max(options.workers, together)  # chunks that are submitted ahead
        self._encoders = ThreadPoolExecutor(options.workers, "encoder")
        self._decoders: DecodingThreads = decoding_threads(engine, options.workers, together)
        self._stop = Event()
        self._results: list[Transcript] = []

    def run(self, stream: AudioStream, mel: MelWindows, progress: ProgressCallback) -> Transcript:
        """Transcribe an audio file that is open twice.

        Args:
            stream: the samples, in which speech is detected ahead of the transcription.
            mel: the spectrogram that is transcribed.
            progress: called after every chunk with the seconds done and the total, or None.

        Raises:
            IncompleteError: the transcription failed after some text was transcribed.
            Interrupted: Ctrl-C was pressed.
        """
        chunks = self._chunks(stream)
        first = next(chunks, None)
        decode = self._options.decode
        start = first.start if first else 0
        language = spoken_language(self._engine.decoder(), decode.language, mel, start).code
        self._options = replace(self._options, decode=replace(decode, language=language))

        def transcript_so_far() -> Transcript:
            return _joined(self._results, language, stream.n_decoded / SAMPLE_RATE)

        def report(chunk: Span) -> None:
            progress(chunk.end / FRAMES_PER_SECOND, mel.duration_s)

        with incomplete_as_error(transcript_so_far):
            self._gather(self._submitted(mel, chain([first] if first else [], chunks)), report)
        transcript = transcript_so_far()
        progress(transcript.duration_s, transcript.duration_s)
        return transcript

    def _chunks(self, stream: AudioStream) -> Iterator[Span]:
        """Yield the chunks of speech in order."""
        return cut_chunks(
            speech_spans(stream, self._vad),
            self._engine.audio_frames,
            pad=round(self._vad.pad_s * FRAMES_PER_SECOND),
            longest_silence=round(self._vad.max_silence_s * FRAMES_PER_SECOND),
        )

    def _gather(self, futures: Iterable[Future[Result]], report: Callable[[Span], None]) -> None:
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

    def _take(self, pending: deque[Future[Result]]) -> Span:
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

    def _submitted(self, mel: MelWindows, chunks: Iterable[Span]) -> Iterator[Future[Result]]:
        """Submit chunks and yield their futures. If reading fails, the last future has the exception."""
        try:
            for chunk in chunks:
                if chunk.n_frames <= self._engine.audio_frames:
                    chunk_mel = ChunkMel(mel, chunk)
                    features = self._encoders.submit(self._engine.encode, chunk_mel.frames)
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
        self, chunk: Span, mel: Mel, encoded: Callable[[], Floats] | None, decoder: Decoder
    ) -> Steps[Result]:
        """Transcribe one chunk in a decoder thread."""
        session = Session(
            decoder,
            self._tokenizer,
            self._options,
            StoppableMel(mel, self._stop),
            self._sampler,
            [(chunk.start, chunk.end)],
            encoded,
        )
        transcript = yield from session.steps(lambda _done, _of: None)
        return chunk, transcript


def _joined(results: Sequence[Transcript], language: str, duration_s: float) -> Transcript:
    """Join the transcripts of chunks in order."""
    return Transcript(
        text=" ".join(result.text for result in results if result.text),
        segments=tuple(segment for result in results for segment in result.segments),
        language=language,
        duration_s=duration_s,
        truncated=tuple(start for result in results for start in result.truncated),
    )
