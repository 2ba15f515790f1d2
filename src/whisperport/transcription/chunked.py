"""Transcribe chunks of speech, each as a recording of its own, several at once, in bounded memory.

    this thread   finds speech ─► cuts chunks ─► takes the spectrogram of each, in order
    workers       decode a chunk each, over the same runners
    this thread   puts the results together, in order

What is said does not depend on the number of workers: no chunk knows of another.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from queue import SimpleQueue

import numpy as np

from whisperport.audio import (
    FRAMES_PER_SECOND,
    SAMPLE_RATE,
    AudioStream,
    RecordingMel,
    Span,
    VadOptions,
    cut_chunks,
    speech_spans,
)
from whisperport.errors import IncompleteError, UsageError
from whisperport.runtime import Draw, Engine, Floats
from whisperport.text import Tokenizer
from whisperport.transcription.incomplete import incomplete_as_error
from whisperport.transcription.options import TranscribeOptions
from whisperport.transcription.session import Mel, Session, spoken_language
from whisperport.transcription.transcript import Heard, Transcript

Result = tuple[Span, Transcript]


class ChunkMel:
    """The spectrogram of one chunk, which fits a window, held in memory."""

    def __init__(self, mel: RecordingMel, chunk: Span) -> None:
        self.duration_s = mel.duration_s
        self._start = chunk.start
        self._frames, self._n_frames = mel.window(chunk.start)

    def window(self, start: int) -> tuple[Floats, int]:
        done = start - self._start
        frames = np.zeros_like(self._frames)
        frames[:, : frames.shape[1] - done] = self._frames[:, done:]
        return frames, max(self._n_frames - done, 0)


class ChunkedTranscription:
    """How the chunks of one recording are decoded: the options, and an engine for each worker.

    Raises:
        UsageError: injected draws and several workers, which would take each other's.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        options: TranscribeOptions,
        vad: VadOptions,
        draw: Draw | None,
    ) -> None:
        if draw is not None and options.workers > 1:
            raise UsageError(
                "`draw` is for one worker",
                why="several would take each other's draws",
                hint="leave out `draw` or `workers`",
            )
        self._engine, self._tokenizer = engine, tokenizer
        self._options, self._vad, self._draw = options, vad, draw
        self._engines: SimpleQueue[Engine] = SimpleQueue()
        for _ in range(options.workers):
            self._engines.put(engine.twin())

    def run(self, stream: AudioStream, mel: RecordingMel, progress: Heard) -> Transcript:
        """Transcribe a recording, given twice: `stream` runs ahead to find speech, `mel` follows.

        Raises:
            IncompleteError: it failed after something was said.
            Interrupted: Ctrl-C.
        """
        chunks = self._chunks(stream)
        first = next(chunks, None)
        decode = self._options.decode
        language = spoken_language(self._engine, decode.language, mel, first.start if first else 0)
        self._options = replace(self._options, decode=replace(decode, language=language))
        results: list[Transcript] = []

        def together() -> Transcript:
            return _together(results, language, stream.n_decoded / SAMPLE_RATE)

        with incomplete_as_error(together):
            for chunk, result in self._results(mel, chain([first] if first else [], chunks)):
                results.append(result)
                progress(chunk.end / FRAMES_PER_SECOND, mel.duration_s)
        transcript = together()
        progress(transcript.duration_s, transcript.duration_s)
        return transcript

    def _chunks(self, stream: AudioStream) -> Iterator[Span]:
        return cut_chunks(
            speech_spans(stream, self._vad),
            self._engine.sound_frames,
            pad=round(self._vad.pad_s * FRAMES_PER_SECOND),
            longest_silence=round(self._vad.max_silence_s * FRAMES_PER_SECOND),
        )

    def _results(self, mel: RecordingMel, chunks: Iterable[Span]) -> Iterator[Result]:
        """In order, and no further ahead than keeps every worker busy."""
        pool = ThreadPoolExecutor(self._options.workers)
        pending: deque[Future[Result]] = deque()
        try:
            for chunk in chunks:
                pending.append(self._submitted(pool, mel, chunk))
                if len(pending) > 2 * self._options.workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _submitted(
        self, pool: ThreadPoolExecutor, mel: RecordingMel, chunk: Span
    ) -> Future[Result]:
        if chunk.n_frames <= self._engine.sound_frames:
            return pool.submit(self._transcribed, ChunkMel(mel, chunk), chunk)
        # Longer than a window: read as it is decoded, so nobody else may read until it is done.
        future = pool.submit(self._transcribed, mel, chunk)
        future.exception()
        return future

    def _transcribed(self, mel: Mel, chunk: Span) -> Result:
        engine = self._engines.get()
        try:
            parts = [(chunk.start, chunk.end)]
            session = Session(engine, self._tokenizer, self._options, mel, self._draw, parts)
            return chunk, session.run(lambda _done, _of: None)
        except IncompleteError as error:  # `run` says what was said, of all chunks
            raise error.__cause__ or error from None
        finally:
            self._engines.put(engine)


def _together(results: Sequence[Transcript], language: str, duration_s: float) -> Transcript:
    return Transcript(
        text=" ".join(result.text for result in results if result.text),
        segments=tuple(segment for result in results for segment in result.segments),
        language=language,
        duration_s=duration_s,
        truncated=tuple(start for result in results for start in result.truncated),
    )
