"""Run several decodings on each of a few threads, and join the steps that they need at the same time."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from whisperport.errors import NumericalError
from whisperport.runtime.batch import Batch
from whisperport.runtime.cache import Floats
from whisperport.runtime.decode import Decoded, decoding
from whisperport.runtime.decoder import Decoder
from whisperport.runtime.options import DecodeOptions
from whisperport.runtime.stepping import Step, Steps

if TYPE_CHECKING:
    from whisperport.runtime.engine import Engine

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Running:
    """A decoding that has begun: where its result goes, and the steps that it waits for."""

    decoder: Decoder
    decoding: Steps[Any]
    future: Future[Any]
    wanted: Sequence[Step] = ()


class _Worker:
    """A batch, the decodings that use its rows, and the decoders that no decoding uses."""

    def __init__(self, engine: "Engine", limit: int) -> None:
        self.batch = Batch(engine)
        if not 1 <= limit <= self.batch.size:
            raise ValueError(f"`limit` is {limit}; expected 1 to {self.batch.size}")
        self.idle: list[Decoder] = [
            decoder for _ in range(limit) if (decoder := self.batch.decoder())
        ]
        self.running: list[_Running] = []
        self.is_serving = False


class BatchExecutor:
    """Begins decodings in the order in which they are submitted, up to `limit` at a time on each thread.

    A decoding that ends makes room for the next one, so that the batch stays full. The result of a decoding
    does not depend on the others.
    """

    def __init__(self, engine: "Engine", limit: int, threads: int = 1) -> None:
        """
        Args:
            engine: with a program `step_B`.
            limit: number of decodings at a time on each thread, 1 to B.
            threads: number of threads, each with a batch of its own.

        Raises:
            ValueError: the engine has no such program, or the limit is out of range.
        """
        self._workers = [_Worker(engine, limit) for _ in range(threads)]
        self._waiting: deque[tuple[Future[Any], Callable[[Decoder], Steps[Any]]]] = deque()
        self._lock = Lock()  # of what is waiting, and of which workers are serving
        self._threads = ThreadPoolExecutor(threads, "decoder")

    def submit(self, start: Callable[[Decoder], Steps[T]]) -> Future[T]:
        """Schedule a decoding, and return its future result.

        Args:
            start: called on a thread of this executor with the decoder to use; returns the decoding.
        """
        future: Future[T] = Future()
        with self._lock:
            self._waiting.append((future, start))
            free = next((worker for worker in self._workers if not worker.is_serving), None)
            if free is not None:
                free.is_serving = True
                self._threads.submit(self._serve, free)
        return future

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        """Wait for all decodings; with `cancel_futures`, only for those that have begun."""
        if cancel_futures:
            with self._lock:
                waiting, self._waiting = self._waiting, deque()
            for future, _ in waiting:
                future.cancel()
        self._threads.shutdown()

    def _serve(self, worker: _Worker) -> None:
        """Run decodings until there are none."""
        while True:
            self._begin(worker)
            if not worker.running:
                return
            self._advance(worker)

    def _begin(self, worker: _Worker) -> None:
        """Begin decodings while there is room. If there are none at all, serving ends."""
        while worker.idle:
            with self._lock:
                worker.batch.expected = len(worker.running) + len(self._waiting)
                if not self._waiting:
                    worker.is_serving = bool(worker.running)
                    return
                future, start = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            decoder = worker.idle.pop()
            one = _Running(decoder, _begun(start, decoder), future)
            self._resume(one, partial(next, one.decoding), worker)

    def _advance(self, worker: _Worker) -> None:
        """Run the steps that all decodings wait for, and let each go on with its own."""
        active, worker.running = worker.running, []
        steps = [(one.decoder, step) for one in active for step in one.wanted]
        try:
            results = iter(worker.batch.step_all(steps))
        except BaseException as error:
            for one in active:
                self._resume(one, partial(one.decoding.throw, error), worker)
            return
        for one in active:
            found = [next(results) for _ in one.wanted]
            logits = [each for each in found if not isinstance(each, NumericalError)]
            errors = [each for each in found if isinstance(each, NumericalError)]
            resume = partial(one.decoding.send, logits)
            if errors:
                resume = partial(one.decoding.throw, errors[0])
            self._resume(one, resume, worker)

    def _resume(self, one: _Running, resume: Callable[[], Sequence[Step]], worker: _Worker) -> None:
        """Let a decoding go on to its next steps, or to its end."""
        try:
            one.wanted = resume()
            worker.running.append(one)
            return
        except StopIteration as end:
            one.future.set_result(end.value)
        except BaseException as error:
            one.future.set_exception(error)
        worker.idle.append(one.decoder)


def decode_together(
    engine: "Engine", features: Sequence[Floats], options: Sequence[DecodeOptions]
) -> list[Decoded]:
    """Decode windows as `decode_window` does, as many at a time as the batch has rows.

    Args:
        engine: with a program `step_B`.
        features: (T, d) float32 of each window.
        options: of each window.

    Raises:
        ValueError: the engine has no such program.
        UsageError, NumericalError: as for `decode_window`.
    """
    executor = BatchExecutor(engine, engine.batch_size)
    try:
        pairs = zip(features, options, strict=True)
        futures = [executor.submit(partial(_window, *pair)) for pair in pairs]
        return [future.result() for future in futures]
    finally:
        executor.shutdown(cancel_futures=True)


def _window(features: Floats, options: DecodeOptions, decoder: Decoder) -> Steps[Decoded]:
    return decoding(decoder, features, options)


def _begun(start: Callable[[Decoder], Steps[T]], decoder: Decoder) -> Steps[T]:
    """Return a decoding that has not begun: an exception of `start` is one of its first step."""
    return (yield from start(decoder))
