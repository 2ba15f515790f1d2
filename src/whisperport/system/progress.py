"""What long operations tell about their progress, and the remaining time estimated from it.

A function that begins a stage calls `begin_stage`. Who wants to know of stages opens a context around the
work, and no function between the two passes anything on:

    with reporting(print):
        export("tiny.en", "onnxruntime", "bundle")
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[str], None]
"""Called with the name of each stage when the stage begins: a few words in lower case, for one line."""

ProgressCallback = Callable[[float, float | None], None]
"""Called with two lengths in seconds: audio transcribed so far, and all audio; None if not known."""

LEAST_MEASURED_S = 3.0  # no estimate before: the first seconds include what happens only once


class Counted(str):
    """The name of a stage that is one of several equal ones, such as one clip of many.

    Attributes:
        n_finished: number of the equal stages that are finished when this one begins.
        total: number of all of them; 0: not known.
    """

    n_finished: int
    total: int

    def __new__(cls, name: str, n_finished: int = 0, total: int = 0) -> "Counted":
        stage = super().__new__(cls, name)
        stage.n_finished, stage.total = n_finished, total
        return stage


_listener: ContextVar[Progress | None] = ContextVar("listener", default=None)


def begin_stage(name: str) -> None:
    """Call the callback of `reporting`, if there is one, with the name of the stage that begins."""
    if listener := _listener.get():
        listener(name)


@contextmanager
def reporting(progress: Progress) -> Iterator[None]:
    """Call `progress` with the name of each stage that begins in the block.

    It replaces the callback of an outer block. Stages of another thread are not reported, unless the thread
    runs in a copy of this context, as asyncio's tasks do.

    Args:
        progress: called with a few words in lower case, in the thread of the block.
    """
    token = _listener.set(progress)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def prefixed(subject: str) -> Iterator[None]:
    """Name in the block each stage as one of a subject, such as a target."""
    listener = _listener.get() or (lambda _: None)
    with reporting(lambda stage: listener(f"{subject}: {stage}")):
        yield


class Remaining:
    """The remaining time of work, estimated from the speed measured so far.

    The speed is that since the first report of this work: what came before, such as loading, is not part
    of it. If the total changes or the work starts again, so does the measurement.

    Args:
        now: the current time in seconds since any fixed moment.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._total: float | None = None
        self._first: tuple[float, float] = (0.0, 0.0)  # time and work of the first report
        self._last = self._first

    def report(self, work: float, total: float | None) -> None:
        """Record how much of the work is done, in any unit."""
        now = self._now()
        if total != self._total or work < self._last[1]:
            self._total, self._first = total, (now, work)
        self._last = now, work

    def seconds(self) -> float | None:
        """Return the estimate; None: the total is unknown, too little was measured, or it is exceeded."""
        (started, before), (reported, work) = self._first, self._last
        measured = reported - started
        if not self._total or work <= before or measured < LEAST_MEASURED_S:
            return None
        left = measured * (self._total - work) / (work - before) - (self._now() - reported)
        return left if left > 0 else None


def remaining_text(seconds: float | None) -> str:
    """Return the estimate for a line, such as "about 2 min left"; empty if there is none.

    It is rounded, because the speed is not constant: to 5 s below a minute, to minutes below two hours.
    """
    if seconds is None:
        return ""
    if seconds < 57.5:
        return f"about {max(5, 5 * round(seconds / 5))} s left"
    if seconds < 7200:
        return f"about {max(1, round(seconds / 60))} min left"
    return f"about {round(seconds / 3600)} h left"
