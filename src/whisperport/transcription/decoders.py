"""The threads and decoders of a transcription: for each thread a decoder, or a batch."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Protocol, TypeVar

from whisperport.runtime import (
    Batch,
    BatchExecutor,
    Decoder,
    Engine,
    Steps,
    TokenSampler,
    complete,
)
from whisperport.transcription.options import TranscribeOptions

T = TypeVar("T")


class DecodingThreads(Protocol):
    """Runs decodings on threads of its own."""

    def submit(self, start: Callable[[Decoder], Steps[T]]) -> Future[T]:
        """Schedule a decoding: `start` is called with the decoder to use and returns it."""
        ...

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        """Wait for all decodings; with `cancel_futures`, only for those that have begun."""
        ...


class SingleDecoders:
    """Decodes one text at a time on each of several threads."""

    def __init__(self, engine: Engine, threads: int) -> None:
        self._idle: SimpleQueue[Decoder] = SimpleQueue()
        for _ in range(threads):
            self._idle.put(engine.decoder())
        self._threads = ThreadPoolExecutor(threads, "decoder")

    def submit(self, start: Callable[[Decoder], Steps[T]]) -> Future[T]:
        return self._threads.submit(self._completed, start)

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(cancel_futures=cancel_futures)

    def _completed(self, start: Callable[[Decoder], Steps[T]]) -> T:
        decoder = self._idle.get()
        try:
            return complete(decoder, start(decoder))
        finally:
            self._idle.put(decoder)


def texts_together(
    engine: Engine, options: TranscribeOptions, sampler: TokenSampler | None = None
) -> int:
    """Return how many texts a worker decodes together: each beam of a text needs a row of the batch.

    Args:
        engine: the loaded programs.
        options: transcription options.
        sampler: given by the user; texts decoded together would share it in an unpredictable order.

    Returns:
        1 to the number of rows; 1: the texts are decoded singly.
    """
    if not uses_batch(engine, options) or sampler is not None:
        return 1
    return max(1, engine.batch_size // (options.decode.beam_size or 1))


def uses_batch(engine: Engine, options: TranscribeOptions) -> bool:
    """Return whether the bundle can decode several texts together, and the user allows it."""
    return engine.batch_size > 1 and options.batch


def decoding_threads(engine: Engine, threads: int, together: int) -> DecodingThreads:
    """Return threads that each decode `together` texts in a batch or, if that is 1, one text."""
    if together == 1:
        return SingleDecoders(engine, threads)
    return BatchExecutor(engine, together, threads)


def decoder_of(engine: Engine, options: TranscribeOptions) -> Decoder:
    """Return a decoder for one text, whose beams or samples are decoded together if that is possible."""
    candidates = max(options.decode.beam_size or 1, options.decode.best_of or 1)
    decoder = None
    if candidates > 1 and uses_batch(engine, options):
        decoder = Batch(engine).decoder()
    return decoder or engine.decoder()
