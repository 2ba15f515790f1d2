"""Run a job in a child process with limits on its memory and time.

    this process ── name of the job, JSON arguments ──► child
         ◄── stages, then a result or an error, as JSON ──┘

The child is a new interpreter with the module path of this one. It therefore also works from an interactive
session, a script without `if __name__ == "__main__"`, a thread or a daemon process. Its messages are JSON
and are never unpickled. It cannot read standard input, and its output, including that of native libraries,
does not reach the terminal. It ends when this process ends.

On Linux, memory is limited in two ways: an allocation above the limit fails (`RLIMIT_DATA`), and this
process ends the child when its resident memory exceeds the limit. Other systems limit only time.
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
from whisperport.system.progress import Progress

POLL_S = 0.02  # interval of checking the child's memory; the child can fill about 0.2 GB in it
START_S = 120.0  # time to import Python modules and a runtime: torch takes 8 s on a loaded machine
MAX_THREADS = 4  # threads of a job; a runtime has one pool of threads per program
STACKS_BYTES = (
    2 * 8 * 2**20
)  # per core: numpy and a runtime each start a thread with an 8 MiB stack
MAX_LINE = 64 * 2**20  # maximum bytes of a message
PR_SET_PDEATHSIG = 1  # Linux, include/uapi/linux/prctl.h

_BOOT = (
    "import json, sys; request = json.loads(sys.argv[1]); sys.path[:] = request['path']; "
    "from whisperport.system.limited import serve; serve(request)"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a job.

    Attributes:
        memory_bytes: maximum memory.
        seconds: maximum wall-clock time, counted from the first stage of the job.
    """

    memory_bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.memory_bytes / 1e9:.1f} GB of memory and {self.seconds:.0f} seconds"


class StoppedError(Exception):
    """The job exceeded a limit, crashed, or raised an exception other than a WhisperportError."""


def threads_within(threads: int | None) -> int:
    """Return the number of threads of a limited job: `threads` (None: one per core), at most 4."""
    return min(threads or os.cpu_count() or 1, MAX_THREADS)


def run_limited(
    job: str, arguments: dict[str, Any], limits: Limits, progress: Progress = lambda _: None
) -> Any:
    """Run a job in a child process with limits.

    Args:
        job: "package.module:function" of this package. The function is called with `progress` and the
            arguments as keywords. It imports its modules before it calls `progress` for the first time.
        arguments: keyword arguments of the job; the values are JSON.
        limits: maximum memory and time.
        progress: called with the name of each stage; if stages follow each other quickly, only the last.

    Returns:
        The result of the job, after conversion to JSON and back.

    Raises:
        StoppedError: the job exceeded a limit, crashed, or raised an exception other than a
            WhisperportError. The message names the stage.
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
    stage: str = ""  # empty while the child imports modules
    answer: Any = None

    @classmethod
    def start(cls, request: dict[str, Any]) -> "_Child":
        # -P: modules are not imported from the current folder.
        command = [get_executable(), "-P", "-c", _BOOT, json.dumps(request)]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends the child
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
        """Return the resident memory in bytes; 0 if the system does not tell."""
        try:
            return _statm(self.process.pid)[1]
        except (OSError, IndexError):
            return 0

    def stopped(self, why: str) -> StoppedError:
        return StoppedError(f"{self.stage}: {why}" if self.stage else why)

    def end(self) -> None:
        """Kill the child and all processes that it started, if it still runs."""
        if self.process.poll() is None:
            if os.name == "posix":
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        self.reader.join(1.0)


def _watch(child: _Child, limits: Limits, progress: Progress) -> int:
    """Wait for the child, and return its exit code.

    Raises:
        StoppedError: the child exceeded a limit.
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
            exceeded = f"it took more than {limits.seconds:.0f} seconds"
            raise child.stopped(exceeded if known else "its process did not start")
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
    raise child.stopped(_description_of(code))


def _description_of(code: int) -> str:
    if os.name == "posix" and code == -signal.SIGKILL:
        return "the system ended its process, probably because memory ran out"
    if code < 0:
        return f"it crashed with {signal.Signals(-code).name}"
    return f"its process ended with exit code {code} and without a result"


@contextmanager
def memory_within(more_bytes: int) -> Iterator[None]:
    """Limit the memory that this process can allocate in the block, in addition to what it has already.

    An allocation above the limit raises MemoryError, or the error that a library raises instead. Systems
    other than Linux have no such limit.
    """
    if sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _statm(os.getpid())[5] + more_bytes
    lowest = min(limit for limit in (soft, hard, wanted) if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _statm(pid: int) -> list[int]:
    """Return the bytes in /proc/PID/statm: first total size, second resident, sixth data. Linux only."""
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return [int(count) * os.sysconf("SC_PAGE_SIZE") for count in pages]


# The functions below run in the child.


def serve(request: dict[str, Any]) -> None:
    """Run the job of a request, and send its result or error to the parent."""
    pipe = os.fdopen(
        os.dup(1), "wb", buffering=0
    )  # processes that the job starts do not inherit it
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
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
    """Return the first line of an exception's message, cut to 300 characters."""
    return str(error).strip().split("\n")[0][:300]


def _send(pipe: IO[bytes], message: dict[str, Any]) -> None:
    pipe.write(json.dumps(message).encode("ascii") + b"\n")


def _end_with_parent(parent: int) -> None:
    """End this process when its parent ends. On systems other than Linux, the CPU time limit ends it."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(1)


def _limit(memory_bytes: int, cpu_s: int) -> None:
    if os.name != "posix":
        return
    import resource

    wanted = {resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: cpu_s}
    if sys.platform == "linux":
        stacks = STACKS_BYTES * (os.cpu_count() or 1)  # stacks count as data, but are hardly used
        wanted[resource.RLIMIT_DATA] = memory_bytes + stacks
    for kind, limit in wanted.items():
        _, hard = resource.getrlimit(kind)
        lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (lowest, lowest))
