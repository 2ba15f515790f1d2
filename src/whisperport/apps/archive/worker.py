"""Transcribe files one after the other, or several together, with one loaded bundle.

A worker is this class in a process of its own, or in an actor of Ray.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from whisperport.apps.archive.identity import options_for
from whisperport.apps.archive.job import Job
from whisperport.apps.archive.rows import Row, row_of
from whisperport.errors import AudioError
from whisperport.program.bundle.folder import file_sha256
from whisperport.runtime import BatchExecutor, Decoder, Steps
from whisperport.runtime.decoding.decode import check_language
from whisperport.runtime.kv_cache.stepping import Step
from whisperport.speech.audio.decode import open_source
from whisperport.system.regular_file import other_kind
from whisperport.transcription import TranscribeOptions, Transcriber, Transcript
from whisperport.transcription.decoders import texts_together
from whisperport.transcription.files import file_steps

T = TypeVar("T")

AHEAD = 2  # files that wait in a worker, so that it never waits for its next one


class Worker:
    """A loaded bundle that transcribes the files of an archive.

    Args:
        bundle: folder of the bundle.
        options: of all files.

    Attributes:
        depth: number of files to give to it at a time: those that it decodes together, and the next ones.

    Raises:
        BundleError, MissingPackageError: the bundle cannot be loaded.
    """

    def __init__(self, bundle: Path, options: TranscribeOptions) -> None:
        self._options = options
        self._transcriber = Transcriber(bundle, options.run)
        engine = self._transcriber.engine
        together = 1 if options.vad else texts_together(engine, options)
        self._threads = BatchExecutor(engine, together)
        self.depth = together + AHEAD

    def submit(self, job: Job) -> Future[Row]:
        """Schedule a file. Every exception that it raises is in its row."""
        return self._threads.submit(partial(self._row, job))

    def _row(self, job: Job, decoder: Decoder) -> Steps[Row]:
        started, messages = time.monotonic(), list[str]()
        result: dict[str, Any] = {}
        own = self._options
        try:
            own = options_for(job, self._options)
            _check_readable(job.path)
            result["audio_sha256"] = file_sha256(Path(job.path))
            check_language(self._transcriber.engine.generation, own.decode)
            steps = self._transcribed(job.path, own, decoder)
            result["transcript"] = yield from _recording(steps, messages)
        except GeneratorExit:
            raise
        except BaseException as error:  # of Rust too: a panic is no `Exception`
            result["error"] = error
        return row_of(
            job,
            **result,
            warnings=messages,
            thresholds=own.thresholds,
            seconds=time.monotonic() - started,
        )

    def _transcribed(
        self, path: str, options: TranscribeOptions, decoder: Decoder
    ) -> Steps[Transcript]:
        if options.vad is not None:  # it decodes its chunks together, with decoders of its own
            return self._transcriber.transcribe(path, options)
        return (yield from file_steps(self._transcriber, path, options, Event(), decoder))


def _check_readable(path: str) -> None:
    """Check a file before it is hashed.

    Raises:
        AudioError: it is missing, unreadable or empty; or a pipe, which could block, or a device.
    """
    if kind := other_kind(path):
        raise AudioError(
            f"`{path}` is {kind}",
            why="it is not a file",
            hint="give regular files",
            code="not-a-file",
        )
    file, _, _ = open_source(path)
    file.close()


def _recording(steps: Steps[T], messages: list[str]) -> Steps[T]:
    """Run the steps of one file, and add the warnings that it raises to `messages`.

    Files decoded together take turns on one thread, so warnings are caught in each turn.
    """
    resume: Callable[[], Sequence[Step]] = partial(next, steps)
    while True:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                requested = resume()
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                messages += [str(warning.message) for warning in caught]
        try:
            scored = yield requested
        except BaseException as error:
            resume = partial(steps.throw, error)
        else:
            resume = partial(steps.send, scored)
