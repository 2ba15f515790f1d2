"""Transcribe chunks of speech, each as a recording of its own: a pipeline, in bounded memory.

    this thread   finds speech ─► cuts chunks ─► takes the spectrogram of each, in order
    encoders      encode the first window of the chunks to come, while
    decoders      decode those before, over the same runners
    this thread   puts the results together, in order

There are as many encoders and as many decoders as workers, so one worker has both at work. What is said
does not depend on any of this: no chunk knows of another.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from queue import SimpleQueue
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
from whisperport.runtime import Decoder, Engine, Floats, TokenSampler
from whisperport.text import Tokenizer
from whisperport.transcription.incomplete import incomplete_as_error
from whisperport.transcription.options import TranscribeOptions
from whisperport.transcription.session import Mel, Session, spoken_language
from whisperport.transcription.transcript import Transcript

Result = tuple[Span, Transcript]


class ChunkMel:
    """The spectrogram of one chunk, which fits a window, held in memory; silence follows it."""

    def __init__(self, mel: MelWindows, chunk: Span) -> None:
        self.duration_s = mel.duration_s
        self._start = chunk.start
        self.frames, n_frames = mel.window(chunk.start)  # (n_mels, 2T): the first window
        self._n_frames = min(n_frames, chunk.n_frames)
        self.frames[:, self._n_frames :] = 0

    def window(self, start: int) -> tuple[Floats, int]:
        done = start - self._start
        frames = np.zeros_like(self.frames)
        frames[:, : frames.shape[1] - done] = self.frames[:, done:]
        return frames, max(self._n_frames - done, 0)


class StoppedMel:
    """A spectrogram of which no window is given once `stop` is set.

    Ctrl-C reaches one thread only; this is how the others hear of it.
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
    """The chunks of one audio file in progress, and a decoder for each worker. Runs once.

    Raises:
        UsageError: injected draws and several workers, which would take each other's.
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
                "`sampler` is for one worker",
                why="several would take each other's draws",
                hint="leave out `sampler` or `workers`",
            )
        self._engine, self._tokenizer = engine, tokenizer
        self._options, self._vad, self._sampler = options, vad, sampler
        self._idle: SimpleQueue[Decoder] = SimpleQueue()
        for _ in range(options.workers):
            self._idle.put(engine.decoder())
        self._encoders = ThreadPoolExecutor(options.workers, "encoder")
        self._decoders = ThreadPoolExecutor(options.workers, "decoder")
        self._stop = Event()
        self._results: list[Transcript] = []

    def run(self, stream: AudioStream, mel: MelWindows, progress: ProgressCallback) -> Transcript:
        """Transcribe a recording, given twice: `stream` runs ahead to find speech, `mel` follows.

        Raises:
            IncompleteError: it failed after something was said.
            Interrupted: Ctrl-C.
        """
        chunks = self._chunks(stream)
        first = next(chunks, None)
        decode = self._options.decode
        start = first.start if first else 0
        language = spoken_language(self._engine.decoder(), decode.language, mel, start).code
        self._options = replace(self._options, decode=replace(decode, language=language))

        def together() -> Transcript:
            return _together(self._results, language, stream.n_decoded / SAMPLE_RATE)

        def heard(chunk: Span) -> None:
            progress(chunk.end / FRAMES_PER_SECOND, mel.duration_s)

        with incomplete_as_error(together):
            self._gather(self._submitted(mel, chain([first] if first else [], chunks)), heard)
        transcript = together()
        progress(transcript.duration_s, transcript.duration_s)
        return transcript

    def _chunks(self, stream: AudioStream) -> Iterator[Span]:
        return cut_chunks(
            speech_spans(stream, self._vad),
            self._engine.audio_frames,
            pad=round(self._vad.pad_s * FRAMES_PER_SECOND),
            longest_silence=round(self._vad.max_silence_s * FRAMES_PER_SECOND),
        )

    def _gather(self, futures: Iterable[Future[Result]], heard: Callable[[Span], None]) -> None:
        """Take results in order, and submit no further ahead than keeps every thread busy."""
        pending: deque[Future[Result]] = deque()
        try:
            for future in futures:
                pending.append(future)
                if len(pending) > 2 * self._options.workers:
                    heard(self._take(pending))
            while pending:
                heard(self._take(pending))
        except KeyboardInterrupt:
            self._end()
            with suppress(Exception, KeyboardInterrupt):  # until the first that was not done
                while pending:
                    self._take(pending)
            raise
        finally:
            self._end()

    def _take(self, pending: deque[Future[Result]]) -> Span:
        """Keep the oldest's result; of one that failed what it said, and nothing of those after it."""
        pending[0].exception()  # waits; Ctrl-C may come here, and loses none
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
        """Begin nothing more, and wait for the windows that are at work."""
        self._stop.set()
        self._encoders.shutdown(wait=False, cancel_futures=True)  # a decoder may wait for one
        self._decoders.shutdown(cancel_futures=True)
        self._encoders.shutdown()

    def _submitted(self, mel: MelWindows, chunks: Iterable[Span]) -> Iterator[Future[Result]]:
        """Each chunk's result to come; a failure to read more is the last one's."""
        try:
            for chunk in chunks:
                if chunk.n_frames <= self._engine.audio_frames:
                    held = ChunkMel(mel, chunk)
                    features = self._encoders.submit(self._engine.encode, held.frames)
                    yield self._decoders.submit(self._decoded, chunk, held, features.result)
                else:
                    future = self._decoders.submit(self._decoded, chunk, mel)
                    yield future
                    future.exception()  # wait: it reads as it goes, so nobody else may
        except Exception as error:
            failed: Future[Result] = Future()
            failed.set_exception(error)
            yield failed

    def _decoded(
        self, chunk: Span, mel: Mel, encoded: Callable[[], Floats] | None = None
    ) -> Result:
        decoder = self._idle.get()
        try:
            session = Session(
                decoder,
                self._tokenizer,
                self._options,
                StoppedMel(mel, self._stop),
                self._sampler,
                [(chunk.start, chunk.end)],
                encoded,
            )
            return chunk, session.run(lambda _done, _of: None)
        finally:
            self._idle.put(decoder)


def _together(results: Sequence[Transcript], language: str, duration_s: float) -> Transcript:
    return Transcript(
        text=" ".join(result.text for result in results if result.text),
        segments=tuple(segment for result in results for segment in result.segments),
        language=language,
        duration_s=duration_s,
        truncated=tuple(start for result in results for start in result.truncated),
    )
