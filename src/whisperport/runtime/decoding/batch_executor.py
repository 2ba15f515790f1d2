"""Run several decodings on each of a few threads, and join the steps that they need at the same time."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from whisperport.errors import NumericalError
from whisperport.runtime.decoding.decode import Decoded, decoding
from whisperport.runtime.decoding.decode_options import DecodeOptions
from whisperport.runtime.engine.engine import Engine
from whisperport.runtime.engine.scores import Floats
from whisperport.runtime.kv_cache.batch import Batch, single_step
from whisperport.runtime.kv_cache.decoder import Decoder
from whisperport.runtime.kv_cache.stepping import Scored, Step, Steps

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Waiting:
    """A decoding that has not begun."""

    due: float
    urgent: bool
    start: Callable[[Decoder], Steps[Any]]
    future: Future[Any]


@dataclass(slots=True, eq=False)
class _Running:
    """A decoding that has begun: where its result goes, and the steps that it waits for."""

    decoder: Decoder
    decoding: Steps[Any]
    future: Future[Any]
    idle: list[Decoder]  # to which its decoder returns
    urgent: bool
    requested: Sequence[Step] = ()


class _Worker:
    """The decodings of one thread, and the decoders that no decoding uses: rows of a batch, if any."""

    def __init__(self, engine: Engine, limit: int, spare: int) -> None:
        self.batch = Batch(engine) if limit > 1 else None
        size = self.batch.size if self.batch else engine.batch_size
        if not 1 <= limit <= size:
            raise ValueError(f"`limit` is {limit}; expected 1 to {size}")
        rows = [self.batch.decoder() for _ in range(limit)] if self.batch else [Decoder(engine)]
        self.idle = [decoder for decoder in rows if decoder]
        self.spare = [Decoder(engine) for _ in range(spare)]  # for urgent decodings only
        self.running: list[_Running] = []
        self.is_serving = False

    def expect(self, waiting: int) -> None:
        """Let the batch know how many decodings use its rows, or will as soon as rows are free."""
        if self.batch:
            self.batch.expected = len(self.running) + waiting

    def step_all(self, steps: Sequence[tuple[Decoder, Step]]) -> list[Scored | NumericalError]:
        """Decode one token for each step: see `Batch.step_all`."""
        return self.batch.step_all(steps) if self.batch else [single_step(*step) for step in steps]


class BatchExecutor:
    """Begins decodings in the order in which they are due, up to `limit` at a time on each thread.

    A decoding that ends makes room for the next one, so that the batch stays full. The result of a decoding
    does not depend on the others.
    """

    def __init__(self, engine: Engine, limit: int, threads: int = 1, *, spare: int = 0) -> None:
        """
        Args:
            engine: the loaded programs; with a program `step_B`, if `limit` is above 1.
            limit: number of decodings at a time on each thread, 1 to B. 1: they are decoded singly.
            threads: number of threads, each with a batch of its own.
            spare: number of further decoders of each thread, for urgent decodings while all others are
                in use. Their steps follow those of the batch.

        Raises:
            ValueError: the engine has no such program, or the limit is out of range.
        """
        self._workers = [_Worker(engine, limit, spare) for _ in range(threads)]
        self._waiting: list[_Waiting] = []  # in the order in which they were submitted
        self._lock = Lock()  # of what is waiting, and of which workers are serving
        self._threads = ThreadPoolExecutor(threads, "decoder")

    def submit(
        self, start: Callable[[Decoder], Steps[T]], *, due: float = 0.0, urgent: bool = False
    ) -> Future[T]:
        """Schedule a decoding, and return its future result.

        Args:
            start: called on a thread of this executor with the decoder to use; returns the decoding.
            due: the decoding with the lowest number begins first; of equal ones, the earliest.
            urgent: it may use a spare decoder.
        """
        future: Future[T] = Future()
        with self._lock:
            self._waiting.append(_Waiting(due, urgent, start, future))
            free = next((worker for worker in self._workers if not worker.is_serving), None)
            if free is not None:
                free.is_serving = True
                self._threads.submit(self._serve, free)
        return future

    @property
    def waiting(self) -> int:
        """Number of decodings that have not begun."""
        return len(self._waiting)

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        """Wait for all decodings; with `cancel_futures`, only for those that have begun."""
        if cancel_futures:
            with self._lock:
                waiting, self._waiting = self._waiting, []
            for decoding in waiting:
                decoding.future.cancel()
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
        while idle := worker.idle or worker.spare:
            with self._lock:
                worker.expect(len(self._waiting))
                allowed = [
                    decoding for decoding in self._waiting if decoding.urgent or idle is worker.idle
                ]
                if not allowed:
                    worker.is_serving = bool(worker.running)
                    return
                first = min(allowed, key=lambda decoding: decoding.due)
                self._waiting.remove(first)
            if not first.future.set_running_or_notify_cancel():
                continue
            decoder = idle.pop()
            running = _Running(
                decoder, _begun(first.start, decoder), first.future, idle, first.urgent
            )
            self._resume(running, partial(next, running.decoding), worker)
            if any(each.urgent for each in worker.running):
                return  # it goes on after each encoder run, not after those of all that wait

    def _advance(self, worker: _Worker) -> None:
        """Run the steps that all decodings wait for, and let each go on with its own."""
        active, worker.running = worker.running, []
        steps = [(running.decoder, step) for running in active for step in running.requested]
        try:
            results = iter(worker.step_all(steps))
        except BaseException as error:
            for running in active:
                self._resume(running, partial(running.decoding.throw, error), worker)
            return
        for running in active:
            scores = [next(results) for _ in running.requested]
            logits = [each for each in scores if not isinstance(each, NumericalError)]
            errors = [each for each in scores if isinstance(each, NumericalError)]
            resume = partial(running.decoding.send, logits)
            if errors:
                resume = partial(running.decoding.throw, errors[0])
            self._resume(running, resume, worker)

    def _resume(
        self, running: _Running, resume: Callable[[], Sequence[Step]], worker: _Worker
    ) -> None:
        """Let a decoding go on to its next steps, or to its end."""
        try:
            running.requested = resume()
            worker.running.append(running)
            return
        except StopIteration as end:
            result, error = end.value, None
        except BaseException as failure:
            result, error = None, failure
        running.idle.append(
            running.decoder
        )  # first: what waits for the result may submit the next decoding
        if error is None:
            running.future.set_result(result)
        else:
            running.future.set_exception(error)


def decode_together(
    engine: Engine, features: Sequence[Floats], options: Sequence[DecodeOptions]
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
