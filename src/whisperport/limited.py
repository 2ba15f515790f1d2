"""Run a job in a child process with limits on its memory and time.

    this process ── name of the job, JSON arguments ──► child
         ◄── stages, then a result or an error, as JSON ──┘

The child is a fresh interpreter with the module path of this one, so that it also works from an
interactive session, a script without `if __name__ == "__main__"`, a thread or a daemon process.
Nothing that it sends is unpickled. It cannot read standard input, and nothing that it or a native
library prints reaches the terminal. It ends with this process.

Linux limits memory twice. The kernel refuses a single allocation that is too large (`RLIMIT_DATA`),
and this process ends the child when its resident memory exceeds the limit. Other systems only
limit time.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.spawn import get_executable
from pathlib import Path
from threading import Thread
from typing import IO, Any

from whisperport import errors
from whisperport.errors import WhisperportError
from whisperport.progress import Progress

POLL_S = 0.02  # between two looks at the child's memory; it can fill about 0.2 GB meanwhile
START_S = 120.0  # for Python and a runtime to be imported: torch takes 8 s on a loaded machine
MAX_THREADS = 4  # of a trial; a runtime has a pool of threads for each program
STACKS_BYTES = (
    2 * 8 * 2**20
)  # per core: numpy and a runtime each start a thread, with 8 MiB of stack
MAX_LINE = 64 * 2**20  # bytes of a result
PR_SET_PDEATHSIG = 1  # Linux, include/uapi/linux/prctl.h

_BOOT = (
    "import json, sys; request = json.loads(sys.argv[1]); sys.path[:] = request['path']; "
    "from whisperport.limited import serve; serve(request)"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a job may use."""

    memory_bytes: int
    seconds: float  # from the first stage of the job

    def __str__(self) -> str:
        return f"{self.memory_bytes / 1e9:.1f} GB of memory and {self.seconds:.0f} seconds"


class StoppedError(Exception):
    """The job exceeded a limit, crashed, or raised an exception of another library."""


def threads_within(threads: int | None) -> int:
    """The number of threads that a limited job uses in place of `threads`."""
    return min(threads or os.cpu_count() or 1, MAX_THREADS)


def run_limited(
    job: str, arguments: dict[str, Any], limits: Limits, progress: Progress = lambda _: None
) -> Any:
    """Run a job in a child process.

    Args:
        job: "package.module:function" of this package. The function is called with `progress` and the
            arguments as keywords. It imports what it needs before it calls `progress`.
        arguments: anything that JSON holds.
        progress: told every stage, or the last of several that follow each other quickly.

    Returns:
        What the job returned, as JSON gives it back.

    Raises:
        StoppedError: the job exceeded a limit, crashed, or raised what is no WhisperportError; the
            message names the stage.
        WhisperportError: raised by the job.
    """
    request = {
        "job": job,
        "arguments": arguments,
        "path": sys.path,
        "parent": os.getpid(),
        "memory_bytes": limits.memory_bytes,
        "cpu_s": math.ceil(MAX_THREADS * (START_S + limits.seconds)),
    }
    child = _Child.start(request)
    try:
        code = _watch(child, limits, progress)
    finally:
        child.end()
    return _result(child, code)


@dataclass(slots=True)
class _Child:
    process: "subprocess.Popen[bytes]"
    reader: Thread = field(init=False)
    stage: str = ""  # empty: it imports
    answer: Any = None

    @classmethod
    def start(cls, request: dict[str, Any]) -> "_Child":
        # -P: the current folder does not become a place to import modules from.
        command = [get_executable(), "-P", "-c", _BOOT, json.dumps(request)]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches this process only, which ends the child
            )
        except OSError as error:
            raise StoppedError(f"no process could be started: {error.strerror}") from error
        child = cls(process)
        assert process.stdout is not None
        child.reader = Thread(target=child._read, args=(process.stdout,), daemon=True)
        child.reader.start()
        return child

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe, suppress(OSError, ValueError, RecursionError):
            while line := pipe.readline(MAX_LINE):
                match json.loads(line):
                    case {"stage": str(stage)}:
                        self.stage = stage
                    case answer:
                        self.answer = answer

    def resident_bytes(self) -> int:
        """Memory in use; 0 where the system does not tell."""
        try:
            return _statm(self.process.pid)[1]
        except (OSError, IndexError):
            return 0

    def stopped(self, why: str) -> StoppedError:
        return StoppedError(f"{self.stage}: {why}" if self.stage else why)

    def end(self) -> None:
        """Kill the child and every process that it started, unless it has ended."""
        if self.process.poll() is None:
            if os.name == "posix":
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        self.reader.join(1.0)


def _watch(child: _Child, limits: Limits, progress: Progress) -> int:
    """The exit code of the child, which stays within its limits.

    Raises:
        StoppedError: it did not.
    """
    deadline, known = time.monotonic() + START_S, ""
    while True:
        with suppress(subprocess.TimeoutExpired):
            return child.process.wait(POLL_S)
        now = time.monotonic()
        if child.stage != known:
            deadline = deadline if known else now + limits.seconds
            known = child.stage
            progress(known)
        if now > deadline:
            took = f"it took more than {limits.seconds:.0f} seconds"
            raise child.stopped(took if known else "its process did not start")
        if child.resident_bytes() > limits.memory_bytes:
            raise child.stopped(f"it used more than {limits.memory_bytes / 1e9:.1f} GB of memory")


def _result(child: _Child, code: int) -> Any:
    match child.answer:
        case {"result": result} if code == 0:
            return result
        case {"kind": str(kind), "what": str(what), "why": str(why), "hint": str(hint)}:
            raise getattr(errors, kind, WhisperportError)(what, why=why, hint=hint)
        case {"stopped": str(why)}:
            raise child.stopped(why)
    raise child.stopped(_how_it_ended(code))


def _how_it_ended(code: int) -> str:
    if os.name == "posix" and code == -signal.SIGKILL:
        return "the system ended its process, most likely because memory ran out"
    if code < 0:
        return f"it crashed with {signal.Signals(-code).name}"
    return f"its process ended with exit code {code} and without an answer"


@contextmanager
def memory_within(more_bytes: int) -> Iterator[None]:
    """Within the block this process may allocate so much more; what exceeds it is refused by the kernel.

    It raises MemoryError or what a library makes of it. Systems other than Linux have no such limit.
    """
    if sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = _statm(os.getpid())[5] + more_bytes
    lowest = min(limit for limit in (soft, hard, most) if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _statm(pid: int) -> list[int]:
    """Bytes: the size, the resident part, …, and as the sixth the data of a process of Linux."""
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return [int(count) * os.sysconf("SC_PAGE_SIZE") for count in pages]


# In the child.


def serve(request: dict[str, Any]) -> None:
    """Run the job of a request, and send its result or its error to the parent."""
    pipe = os.fdopen(os.dup(1), "wb", buffering=0)  # not inherited by processes of the job
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    _end_with_parent(request["parent"])
    _limit(request["memory_bytes"], request["cpu_s"])
    module, _, function = request["job"].partition(":")
    try:
        job = getattr(import_module(module), function)
        result = job(progress=lambda stage: _send(pipe, {"stage": stage}), **request["arguments"])
        answer = {"result": result}
    except WhisperportError as error:
        what = {"what": error.what, "why": error.why, "hint": error.hint}
        answer = {"kind": type(error).__name__, **what}
    except BaseException as error:
        answer = {"stopped": f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")}
    _send(pipe, answer)


def first_line(error: BaseException) -> str:
    """The first line of what a library says went wrong, cut to a length that can be read."""
    return str(error).strip().split("\n")[0][:300]


def _send(pipe: IO[bytes], message: dict[str, Any]) -> None:
    pipe.write(json.dumps(message).encode("ascii") + b"\n")


def _end_with_parent(parent: int) -> None:
    """Linux kills the child with its parent; elsewhere the limit on CPU time ends it."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def _limit(memory_bytes: int, cpu_s: int) -> None:
    if os.name != "posix":
        return
    import resource

    wanted = {resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: cpu_s}
    if sys.platform == "linux":
        stacks = STACKS_BYTES * (os.cpu_count() or 1)  # they count as data, and are hardly used
        wanted[resource.RLIMIT_DATA] = memory_bytes + stacks
    for kind, most in wanted.items():
        _, hard = resource.getrlimit(kind)
        lowest = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (lowest, lowest))
