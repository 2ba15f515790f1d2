"""Workers on this machine: processes that each load the bundle, and get files through a pipe."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import Any

from whisperport.apps.archive.dispatch import Done, Ended, Event, Ready
from whisperport.apps.archive.job import Job
from whisperport.apps.archive.rows import Row
from whisperport.apps.archive.worker import Worker
from whisperport.errors import WhisperportError
from whisperport.system.child import (
    Child,
    Sender,
    StoppedError,
    exit_reason,
    first_line,
    kill_with_parent,
    pickled,
    result_of,
    unpickled,
)
from whisperport.system.machine import memory_kills
from whisperport.transcription import TranscribeOptions

WAIT_S = 1.0
_BOOT = (
    "import json, sys; request = json.loads(sys.stdin.buffer.readline()); "
    "sys.path[:] = request['path']; from whisperport.apps.archive.processes import serve; serve(request)"
)
Message = dict[str, Any]


class Processes:
    """Worker processes. Each is started again if it ends.

    Args:
        count: number of processes.
        bundle: folder of the bundle.
        options: of all files.
    """

    def __init__(self, count: int, bundle: Path, options: TranscribeOptions) -> None:
        self._count = count
        arguments = pickled((bundle, options))
        self._request = {"path": sys.path, "parent": os.getpid(), "pickled": arguments}
        self._inbox: queue.SimpleQueue[tuple[_Process, Message | None]] = queue.SimpleQueue()
        self._running: list[_Process] = []

    def grow(self) -> None:
        """Start processes until there are `count`."""
        while len(self._running) < self._count:
            self._running.append(_Process(self._request, self._inbox.put))

    def give(self, worker: Hashable, job: Job) -> None:
        """Give a file to a process; see `Workers`."""
        assert isinstance(worker, _Process)
        worker.send(asdict(job))

    def events(self) -> Iterable[Event]:
        """Wait at most a second for messages; see `Workers`."""
        with suppress(queue.Empty):
            yield self._event(*self._inbox.get(timeout=WAIT_S))
            while True:
                yield self._event(*self._inbox.get_nowait())

    def close(self) -> None:
        """Kill all processes."""
        for process in self._running:
            process.end()

    def _event(self, worker: "_Process", message: Message | None) -> Event:
        match message:
            case {"depth": int(depth)}:
                return Ready(worker, depth)
            case {"row": dict(row)}:
                return Done(worker, row)
            case None:
                self._running.remove(worker)
                worker.end()
                is_short = memory_kills() > worker.memory_kills_before
                reason = exit_reason(worker.process.returncode, was_memory_short=is_short)
                return Ended(worker, reason)
        try:
            result_of(message)
        except StoppedError as error:
            why = str(error)
        raise WhisperportError("the bundle cannot be loaded", why=why)


class _Process(Child):
    """A process that loads the bundle and transcribes files.

    Args:
        request: the first line that it reads.
        receive: called with this process and each message; None: the process has ended.
    """

    def __init__(
        self, request: Message, receive: Callable[[tuple["_Process", Message | None]], object]
    ) -> None:
        # -P: modules are not imported from the current folder.
        self.memory_kills_before = memory_kills()
        super().__init__([get_executable(), "-P", "-c", _BOOT], stderr=subprocess.DEVNULL)
        threading.Thread(target=self._read, args=(receive,), daemon=True).start()
        self.send(request)

    def send(self, message: Message) -> None:
        """Send a line. The pipe stays open: its end tells the child that this process has ended."""
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended, and `_read` tells so
            self.process.stdin.write(json.dumps(message).encode("ascii") + b"\n")
            self.process.stdin.flush()

    def _read(self, receive: Callable[[tuple["_Process", Message | None]], object]) -> None:
        with suppress(OSError, ValueError):  # a line that is cut: the process was killed
            for message in self._messages():
                receive((self, message))
        self.process.wait()
        receive((self, None))

    def _messages(self) -> Iterator[Message]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)


# The functions below run in the child.


def serve(request: Message) -> None:
    """Load the bundle, and transcribe the file of each line of standard input until it ends."""
    kill_with_parent(request["parent"])
    lines = os.fdopen(os.dup(0), "rb")
    send = Sender(os.fdopen(os.dup(1), "wb"))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)  # libraries print
    try:
        worker = Worker(*unpickled(request["pickled"]))
    except WhisperportError as error:
        send(kind=type(error).__name__, what=error.what, why=error.why, hint=error.hint)
        return
    except Exception as error:
        send(stopped=f"{type(error).__name__}: {first_line(error)}")
        return
    send(depth=worker.depth)
    for line in lines:
        worker.submit(Job(**json.loads(line))).add_done_callback(partial(_answer, send))
    os._exit(0)  # the process that asks has ended


def _answer(send: Sender, future: Future[Row]) -> None:
    send(row=future.result())
