"""How many calls of one `Transcriber` are processed at once: the others wait for their turn."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, Lock

from whisperport.errors import UsageError
from whisperport.process import OwnProcess


class Turns:
    """At most `limit` callers hold a turn; the next caller gets one as soon as another returns it.

    Args:
        limit: None: the number of CPU cores that this process may use.

    Raises:
        UsageError: `limit` is below 1.
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise UsageError(f"`max_concurrent` is {limit}", why="expected 1 or more")
        self.limit = limit or available_cores()
        self._process = OwnProcess()
        self._running: set[object] = set()
        # `with self._lock` cannot be interrupted between acquiring and entering, `with Condition()` can.
        self._lock = Lock()
        self._returned = Condition(self._lock)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn, and hold it. An exception at any moment, Ctrl-C included, returns it.

        Raises:
            ForkError: this is a fork of the process that loaded the bundle.
        """
        self._process.check("a `Transcriber`")  # before the lock: a fork copies it as it is
        me = object()
        try:
            with self._lock:
                self._returned.wait_for(lambda: len(self._running) < self.limit)
                self._running.add(me)
            yield
        finally:
            with self._lock:
                self._running.discard(me)
                self._returned.notify()


def available_cores() -> int:
    """CPU cores that this process may use, by its affinity where the system has one."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
