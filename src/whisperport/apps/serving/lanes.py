"""The threads of a server on which its jobs run: to open files, to read windows, to decode by urgency."""

import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from enum import Enum
from functools import partial
from typing import TypeVar

from whisperport.apps.serving.admission import Admission
from whisperport.runtime import BatchExecutor, Decoder, Engine, Steps
from whisperport.transcription import Transcriber

T = TypeVar("T")

READERS = 4  # threads that read windows, each in some 10 ms
OPENERS = (
    16  # threads that read files for the first time: a long file must not keep a short one waiting
)
SPARE = 1  # decoders beside the batch, for live decodings while all rows are in use


class Urgency(Enum):
    """The class of a decoding; its value is how many seconds it may wait longer than a live one.

    A decoding is due when it was submitted, plus these seconds. So live decodings come before those of
    short files, and these before those of long files, but no class waits permanently. The windows of a
    file are submitted one by one, so that files of one class take turns.
    """

    LIVE = 0.0
    SHORT = 5.0  # a file that fits into one window
    FILE = 60.0

    def due(self) -> float:
        """Return when a decoding that is submitted now is due, in seconds of the monotonic clock."""
        return time.monotonic() + self.value


def cancellable(
    start: Callable[[Decoder], Steps[T]], is_cancelled: Callable[[], bool], decoder: Decoder
) -> Steps[T]:
    """Run a decoding as `start(decoder)` does, to its next step after it is cancelled.

    Raises:
        CancelledError: it was cancelled. The decoding is closed, so that what it uses is free.
    """
    if is_cancelled():
        raise CancelledError
    decoding = start(decoder)
    try:
        requested = next(decoding)
        while True:
            if is_cancelled():
                raise CancelledError
            try:
                scored = yield requested
            except BaseException as error:
                requested = decoding.throw(error)
            else:
                requested = decoding.send(scored)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        decoding.close()


def _with_engine(
    start: Callable[[Decoder], Steps[T]], engine: Engine, decoder: Decoder
) -> Steps[T]:
    decoder.use(engine)
    return start(decoder)


def settle(future: Future[T], result: T | None, error: BaseException | None) -> None:
    """Set the outcome of a future that counts as waiting until now; nothing, if it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)  # type: ignore[arg-type]  # a result, since there is no error


class Lanes:
    """Runs what jobs submit, decodings in the order of their urgency.

    Args:
        transcriber: the loaded bundle. Calls of its own methods are not scheduled.
        admission: what waits, and how fast it is transcribed.
        longest_s: maximum duration of an audio file in seconds.
        batch: decode windows together, if the bundle has a program `step_B`. Their log-probabilities then
            differ by up to 1e-4 from those of `Transcriber.transcribe`, since sums have another order.

    Attributes:
        rows: number of windows that are decoded together.
        last_decoded: when a decoding last ended well, in seconds of the monotonic clock; None: not yet.
    """

    def __init__(
        self, transcriber: Transcriber, admission: Admission, longest_s: float, *, batch: bool
    ) -> None:
        self.transcriber, self.admission, self.longest_s = transcriber, admission, longest_s
        self.rows = transcriber.engine.batch_size if batch else 1
        self.last_decoded: float | None = None
        self._decoders = BatchExecutor(transcriber.engine, self.rows, spare=SPARE)
        self._readers = ThreadPoolExecutor(READERS, "reader")
        self._openers = ThreadPoolExecutor(OPENERS, "opener")

    def submit(
        self,
        start: Callable[[Decoder], Steps[T]],
        urgency: Urgency,
        engine: Engine | None = None,
        *,
        yields_s: float = 0.0,
    ) -> Future[T]:
        """Schedule one decoding, such as that of a window.

        Args:
            start: called on a decoder's thread with the decoder to use; returns the decoding. It should not
                read audio or wait.
            urgency: a live decoding may begin while all rows of the batch are in use.
            engine: with the adapter that the client asks for; None: without one.
            yields_s: decodings that are submitted within so many seconds after it may begin before it.

        Returns:
            The future result. `cancel` ends the decoding at its next step, also after it began.
        """
        result: Future[T] = Future()
        begin = partial(_with_engine, start, engine or self.transcriber.engine)
        inner = self._decoders.submit(
            partial(cancellable, begin, result.cancelled),
            due=urgency.due() + yields_s,
            urgent=urgency is Urgency.LIVE,
        )
        result.add_done_callback(lambda _: inner.cancel())  # if it has not begun
        inner.add_done_callback(partial(self._forward, result))
        return result

    def open(self, task: Callable[[], None]) -> None:
        """Run the first reading of a file on a thread for that. The task handles its exceptions."""
        self._openers.submit(task)

    def read(self, task: Callable[[], None]) -> None:
        """Run the reading of a window on a thread for that. The task handles its exceptions."""
        self._readers.submit(task)

    @property
    def waiting(self) -> int:
        """Number of decodings that have not begun."""
        return self._decoders.waiting

    def shutdown(self) -> None:
        """End all threads. What has not begun is cancelled."""
        self._decoders.shutdown(cancel_futures=True)
        self._openers.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)

    def _forward(self, result: Future[T], inner: Future[T]) -> None:
        """Give the outcome of a decoding to the future that the caller has."""
        if inner.cancelled():
            result.cancel()
            return
        error = inner.exception()
        if error is None:
            self.last_decoded = time.monotonic()
        settle(result, None if error else inner.result(), error)
