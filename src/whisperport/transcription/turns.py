"""Limit the number of concurrent calls of one `Transcriber`; further calls wait for a turn."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, Lock

from whisperport.errors import UsageError
from whisperport.system.machine import usable_cores
from whisperport.system.process import OwnProcess


class Turns:
    """Turns for at most `limit` concurrent callers. A waiting caller gets a turn when another returns it.

    Args:
        limit: 1 or more; None: the number of CPU cores that this process may use.

    Raises:
        UsageError: `limit` is below 1.
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise UsageError(f"`max_concurrent` is {limit}", why="expected 1 or more")
        self.limit = limit or usable_cores()
        self._process = OwnProcess()
        self._running: set[object] = set()
        # `with self._lock` cannot be interrupted between acquiring and entering; `with Condition()` can.
        self._lock = Lock()
        self._returned = Condition(self._lock)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn, and hold it during the block. Any exception, Ctrl-C included, returns it.

        Raises:
            ForkError: this process is a fork of the process that loaded the bundle.
        """
        self._process.check("a `Transcriber`")  # before the lock, which a fork copies in its state
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
