"""Transcribe several audio files; where the bundle can, several of them are decoded together."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from threading import Event

from whisperport.errors import WhisperportError
from whisperport.program.bundle import Bundle
from whisperport.runtime import BatchExecutor, Decoder, Steps
from whisperport.runtime.decoding.decode import check_language
from whisperport.speech.audio import AudioSource, MelWindows
from whisperport.transcription.decoders import texts_together
from whisperport.transcription.session import Session, clip_frames
from whisperport.transcription.speech_pipeline import StoppableMel
from whisperport.transcription.transcribe_options import TranscribeOptions
from whisperport.transcription.transcriber import Transcriber
from whisperport.transcription.transcript import Transcript

Outcome = Transcript | WhisperportError


def transcribe_files(
    sources: Iterable[AudioSource],
    bundle: Bundle | str | os.PathLike[str] | Transcriber | None = None,
    options: TranscribeOptions | None = None,
) -> Iterator[Outcome]:
    """Transcribe several audio files, and yield the result of each, in order.

    With a bundle that has a program `step_B`, several files are decoded together, which is faster; with
    several `workers`, in parallel. The texts and times are those of single calls of `transcribe`. Files
    decoded together have sums of float32 in another order: each `avg_logprob` and `no_speech_prob` is
    within 1e-4 of that of a single call (measured with the embedded model and the shipped audio files:
    1.1e-6). Set `batch=False` in the options for equal values. With `vad`, the
    files follow each other, and the chunks of each are decoded together. This counts as one call of the
    transcriber until the last result was taken.

    Args:
        sources: paths, binary file objects, or arrays of samples at 16 kHz.
        bundle: a loaded transcriber; or a bundle or the name of a model, as in `Transcriber`.
        options: transcription options; None: defaults.

    Yields:
        The transcript of each file; or the error, if the file could not be transcribed.

    Raises:
        BundleError, MissingPackageError: the bundle cannot be loaded.
        UsageError: the checkpoint has no such language or task.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    options = options or TranscribeOptions()
    if not isinstance(bundle, Transcriber):
        bundle = Transcriber(bundle, options.run)
    check_language(bundle.engine.generation, options.decode)
    together = texts_together(bundle.engine, options)
    if options.vad is not None or together == options.workers == 1:
        return (_outcome(bundle, source, options) for source in sources)
    return _together(bundle, sources, options, together)


def _outcome(transcriber: Transcriber, source: AudioSource, options: TranscribeOptions) -> Outcome:
    """Transcribe one file singly."""
    try:
        return transcriber.transcribe(source, options)
    except WhisperportError as error:
        return error


def _together(
    transcriber: Transcriber,
    sources: Iterable[AudioSource],
    options: TranscribeOptions,
    together: int,
) -> Iterator[Outcome]:
    """Decode up to `together` files at a time in each worker. A file that ends makes room for the next."""
    pending: deque[Future[Transcript]] = deque()
    stop = Event()
    with transcriber.turns.turn():
        threads = BatchExecutor(transcriber.engine, together, options.workers)
        ahead = 2 * options.workers * together
        try:
            for source in sources:
                pending.append(
                    threads.submit(partial(file_steps, transcriber, source, options, stop))
                )
                if len(pending) >= ahead:
                    yield _result(pending.popleft())
            while pending:
                yield _result(pending.popleft())
        finally:
            stop.set()
            threads.shutdown(cancel_futures=True)


def file_steps(
    transcriber: Transcriber,
    source: AudioSource,
    options: TranscribeOptions,
    stop: Event,
    decoder: Decoder,
) -> Steps[Transcript]:
    """Transcribe one file, and let the caller run the decoder's steps.

    Args:
        transcriber: the loaded bundle.
        source: see `transcribe_files`.
        options: transcription options without `vad`.
        stop: ends the transcription once it is set.
        decoder: used by this file only.
    """
    dims = transcriber.engine.dims
    mel = MelWindows(source, dims.n_mels, dims.n_frames)
    try:
        parts = clip_frames(options.clip_timestamps)
        stoppable = StoppableMel(mel, stop)
        engine, tokenizer = transcriber.engine, transcriber.tokenizer
        session = Session(engine, tokenizer, options, stoppable, None, parts)
        return (yield from session.steps(decoder, lambda _done, _of: None))
    finally:
        mel.close()


def _result(future: Future[Transcript]) -> Outcome:
    try:
        return future.result()
    except WhisperportError as error:
        return error
