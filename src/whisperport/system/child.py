"""Child processes: programs, and jobs of this package. They have limits, and no process is left behind.

    this process ── name of the job, arguments ──► child
         ◄── stages, warnings, then a result or an error: a JSON object on each line ──┘

The child that runs a job is a new interpreter with the module path of this one. It therefore also works
from an interactive session, a script without `if __name__ == "__main__"`, a thread or a daemon process.
It cannot read standard input, and its output, including that of native libraries, does not reach the
terminal. It ends when this process ends.

The messages of a job with limits are never unpickled. On Linux, its memory is limited in two ways: an
allocation above the limit fails (`RLIMIT_DATA`), and this process ends the child when its resident memory
exceeds the limit. Other systems limit only time.
"""

import base64
import faulthandler
import json
import logging
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import IO, Any

from whisperport import errors
from whisperport.errors import WhisperportError
from whisperport.system.machine import usable_cores
from whisperport.system.progress import begin_stage, reporting
from whisperport.system.system_error import system_error

POLL_S = 0.02  # interval of checking the child's memory; the child can fill about 0.2 GB in it
START_S = 120.0  # time to import Python modules and a runtime: torch takes 8 s on a loaded machine
LEAVE_S = 10.0  # time between a job's answer and the end of its process
MAX_THREADS = 4  # threads of a job; a runtime has one pool of threads per program
STACKS_BYTES = (
    2 * 8 * 2**20
)  # per core: numpy and a runtime each start a thread with an 8 MiB stack
MAX_LINE = 64 * 2**20  # maximum bytes of a message
MAX_WAITING = (
    100  # messages that were received and not handled; a child that sends more has to wait
)
PR_SET_PDEATHSIG = 1  # Linux, include/uapi/linux/prctl.h

_BOOT = (
    "import json, sys; request = json.loads(sys.stdin.readline()); sys.path[:] = request['path']; "
    "from whisperport.system.child import serve; serve(request)"
)

log = logging.getLogger(__name__)


class Child:
    """A running child process, in a session of its own.

    Ctrl-C in a terminal reaches only this process, which then ends the child.
    """

    def __init__(self, command: Sequence[str], **how: Any) -> None:
        """Start it, with pipes for its standard input and output.

        Args:
            command: the program and its arguments.
            how: further arguments of `subprocess.Popen`.

        Raises:
            OSError: it cannot be started.
        """
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process: subprocess.Popen[Any] = subprocess.Popen(
            command, **{**pipes, **how}, start_new_session=True
        )

    def end(self, grace_s: float = 0.0) -> None:
        """End it if it is running, with all processes that it started, and close the pipes.

        Args:
            grace_s: seconds between an interrupt, after which it can clean up, and the kill. 0: no
            interrupt.
        """
        if self.process.poll() is None:
            if grace_s:
                self._signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(grace_s)
            self.kill()  # the processes that it started may ignore an interrupt
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with suppress(OSError):  # the process did not read everything
                    stream.close()

    def kill(self) -> None:
        """Kill it with all processes that it started."""
        self._signal(signal.SIGKILL if os.name == "posix" else signal.SIGTERM)
        self.process.wait()

    def _signal(self, number: int) -> None:
        """Send a signal to the process and to those that it started."""
        with suppress(ProcessLookupError, PermissionError):
            if os.name == "posix":
                os.killpg(self.process.pid, number)
            else:
                self.process.kill()


def exit_reason(code: int, *, was_memory_short: bool | None = None) -> str:
    """Return why a process ended, in words.

    Args:
        code: as `subprocess` has it; negative: the number of a signal.
        was_memory_short: whether the system ended processes for lack of memory; None: not known.
    """
    if is_killed(code) and was_memory_short is None:
        return "the system killed the process, most likely because memory ran out"
    if code == -signal.SIGABRT and (limit := memory_limit()):
        return (
            "a library aborted (SIGABRT), most likely because the process may use at most "
            f"{limit / 1e9:.1f} GB of memory (`ulimit -v`)"
        )
    if os.name == "posix" and code == -signal.SIGXCPU:
        return "the process used more CPU time than it may, and was ended (SIGXCPU)"
    if os.name == "posix" and code == -signal.SIGBUS:
        return (
            "the process was ended by SIGBUS, most likely because a file that it reads was shortened "
            "meanwhile, or because a disk is full"
        )
    if code < 0:
        memory = "; the system ended a process then because memory was short" * bool(
            was_memory_short
        )
        return f"the process was ended by signal {-code}{_signal_name(-code)}{memory}"
    return f"the process ended with exit status {code} and did not report a result"


def is_killed(code: int) -> bool:
    """Return whether a process was killed, by its exit code; a library that crashes has another signal."""
    return os.name == "posix" and code == -signal.SIGKILL


def killed(what: str) -> WhisperportError:
    """Make the error for files whose process was killed; it is no verdict on them.

    Args:
        what: ran with them.
    """
    return WhisperportError(
        f"{what} was killed while it ran, so nothing is known of its files",
        why="most likely memory ran out",
        hint="free some memory, or use a machine with more, and repeat the command",
    )


def _signal_name(number: int) -> str:
    known = {member.value: f" ({member.name})" for member in signal.Signals}
    return known.get(number, "")


def memory_limit() -> int | None:
    """Return the limit on the address space of this process and its children in bytes; None: no limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


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


class KilledError(StoppedError):
    """The system, or a person, killed the job: nothing is known of what it ran."""


class StalledError(Exception):
    """The job exceeded the time limit of a stage."""


def threads_within(threads: int | None) -> int:
    """Return the number of threads of a limited job: `threads` (None: one per core), at most 4."""
    return min(threads or usable_cores(), MAX_THREADS)


def run_limited(job: str, arguments: dict[str, Any], limits: Limits) -> Any:
    """Run a job in a child process with limits.

    Args:
        job: "package.module:function" of this package. The function is called with the arguments as
            keywords. It imports its modules before its first stage begins. Its stages are also those of
            this process.
        arguments: keyword arguments of the job; the values are JSON.
        limits: maximum memory and time.

    Returns:
        The result of the job, after conversion to JSON and back.

    Raises:
        StoppedError: the job exceeded a limit, crashed, or raised an exception other than a
            WhisperportError. The message names the stage.
        KilledError: it was killed, although it exceeded no limit.
        WhisperportError: raised by the job.
    """
    cpu_s = math.ceil(MAX_THREADS * (START_S + limits.seconds))
    limited = {"memory_bytes": limits.memory_bytes, "cpu_s": cpu_s}
    try:
        child = Job({"job": job, "arguments": arguments, "limits": limited}, subprocess.DEVNULL)
    except OSError as error:
        raise StoppedError(f"no process could be started: {error.strerror}") from error
    try:
        child.wait(START_S, limits.seconds, memory_bytes=limits.memory_bytes)
        if child.answer is None or ("result" in child.answer and child.exit_code()):
            code = child.exit_code()
            kind = KilledError if is_killed(code) else StoppedError
            raise kind(exit_reason(code))
        return result_of(child.answer)
    except StalledError:
        exceeded = f"it took more than {limits.seconds:.0f} seconds"
        raise child.stopped(exceeded if child.stage else "its process did not start") from None
    except StoppedError as error:
        raise child.stopped(str(error), type(error)) from None
    finally:
        child.end()


def result_of(answer: dict[str, Any]) -> Any:
    """Return the result in the answer of a job.

    Raises:
        WhisperportError: raised by the job.
        KeyboardInterrupt: the job was interrupted.
        StoppedError: the job raised another exception.
    """
    match answer:
        case {"result": result}:
            return result
        case {"kind": str(kind), "what": str(what), "why": str(why), "hint": str(hint)}:
            raise getattr(errors, kind, WhisperportError)(what, why=why, hint=hint)
        case {"interrupted": True}:
            raise KeyboardInterrupt
    raise StoppedError(answer.get("stopped", "it sent no result"))


class Job(Child):
    """A function of this package that runs in a child process.

    Attributes:
        stage: the stage that the job reported last; empty while the child imports modules.
        answer: the last message: `result`, or an error; None: there is none yet.
    """

    def __init__(self, request: dict[str, Any], stderr: Any) -> None:
        """Start it.

        Args:
            request: see `serve`.
            stderr: file for its standard error, and, if it has no limits, also for its standard output.

        Raises:
            OSError: it cannot be started.
        """
        # -P: modules are not imported from the current folder.
        super().__init__([get_executable(), "-P", "-c", _BOOT], stderr=stderr)
        self.stage = ""
        self.answer: dict[str, Any] | None = None
        self._inbox: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        request = {**request, "path": sys.path, "parent": os.getpid()}
        with suppress(OSError):  # it has ended, and `wait` tells so
            # The pipe stays open: its end tells the child that this process has ended.
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(request).encode("ascii") + b"\n")
            self.process.stdin.flush()

    def wait(
        self,
        start_s: float,
        seconds: float,
        *,
        each_stage: bool = False,
        memory_bytes: int | None = None,
    ) -> None:
        """Receive messages until the process ends, or a while after its answer.

        Args:
            start_s: maximum seconds until the first stage.
            seconds: maximum seconds from then on; or for each stage.
            each_stage: which of the two.
            memory_bytes: maximum resident memory; None: any.

        Raises:
            StalledError: it took more time.
            StoppedError: it used more memory.
        """
        deadline = time.monotonic() + start_s
        while True:
            message: dict[str, Any] | None = {}
            with suppress(queue.Empty):
                message = self._inbox.get(timeout=POLL_S)
            match message:
                case None:
                    return
                case {"stage": str(stage)}:
                    if each_stage or not self.stage:
                        deadline = time.monotonic() + seconds
                    self.stage = stage
                    begin_stage(stage)
                case {"warning": str(text)}:
                    log.warning("%s", text)
                case answer if answer:
                    self.answer, deadline = answer, time.monotonic() + LEAVE_S
            if time.monotonic() > deadline:
                if self.answer is not None:
                    return
                raise StalledError
            if memory_bytes is not None and self._resident_bytes() > memory_bytes:
                raise StoppedError(f"it used more than {memory_bytes / 1e9:.1f} GB of memory")

    def exit_code(self) -> int:
        """Return the exit code of the process; 0 if it has answered and does not end."""
        try:
            return self.process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            return 0

    def stopped(self, why: str, kind: type[StoppedError] = StoppedError) -> StoppedError:
        """Make an error that names the stage."""
        return kind(f"{self.stage}: {why}" if self.stage else why)

    def _read(self) -> None:
        pipe = self.process.stdout
        assert pipe is not None
        with suppress(OSError, ValueError, RecursionError):
            while line := pipe.readline(MAX_LINE):
                if isinstance(message := json.loads(line), dict):
                    self._inbox.put(message)
        self._inbox.put(None)

    def _resident_bytes(self) -> int:
        """Return the resident memory in bytes; 0 if the system does not tell."""
        try:
            return _statm(self.process.pid)[1]
        except (OSError, IndexError):
            return 0


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
    total = _statm(os.getpid())[5] + more_bytes
    lowest = min(limit for limit in (soft, hard, total) if limit != resource.RLIM_INFINITY)
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
    """Run the job of a request, and send its result or error to the parent.

    Args:
        request: `path`: the module path. `parent`: the process that asks. Either `job`, `arguments` and
            `limits`; or `pickled`, a function and its arguments, whose standard error is a log.
    """
    # Processes that the job starts inherit neither pipe.
    parent, send = os.dup(0), Sender(os.fdopen(os.dup(1), "wb"))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null if "limits" in request else 2, 1)
    limits = request.get("limits")
    threading.Thread(target=_end_with_parent, args=(parent, not limits), daemon=True).start()
    if limits:
        kill_with_parent(request["parent"])
        _limit(**limits)
    else:
        _log_everything(send)
    try:
        send(result=_run(request, send))
    except WhisperportError as error:
        traceback.print_exc()
        _send_error(send, error)
    except KeyboardInterrupt:
        send(interrupted=True)
    except BaseException as error:
        traceback.print_exc()
        if "limits" not in request:
            known = system_error(error) if isinstance(error, OSError) else None
            if told := errors.out_of_memory(error) or known:
                _send_error(send, told)
                return
        send(stopped=f"{type(error).__name__}: {first_line(error)}".removesuffix(": "))


def _send_error(send: "Sender", error: WhisperportError) -> None:
    send(kind=type(error).__name__, what=error.what, why=error.why, hint=error.hint)


def _run(request: dict[str, Any], send: "Sender") -> Any:
    """Return the result of the job as JSON, and send its stages."""

    def tell(stage: str) -> None:
        if "pickled" in request:
            # The log may be on a full disk, and the job have room elsewhere.
            with suppress(OSError):
                print(f"[{stage}]", flush=True)
        send(stage=stage)

    with reporting(tell):
        if "job" in request:
            module, _, function = request["job"].partition(":")
            result = getattr(import_module(module), function)(**request["arguments"])
            return json.loads(json.dumps(result))
        job, arguments = unpickled(request["pickled"])
        return pickled(job(*arguments))


def pickled(value: Any) -> str:
    """Return a value as text for `unpickled`."""
    return base64.b64encode(pickle.dumps(value)).decode("ascii")


def unpickled(text: str) -> Any:
    """Return the value of a text that `pickled` made; for jobs without limits only."""
    return pickle.loads(base64.b64decode(text))


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, cut to 300 characters."""
    return str(error).strip().split("\n")[0][:300]


class Sender:
    """Sends messages to the parent, one at a time, from any thread."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def __call__(self, **message: Any) -> None:
        line = json.dumps(message).encode("ascii") + b"\n"
        with self._lock:
            self._pipe.write(line)
            self._pipe.flush()


class _ToParent(logging.Handler):
    def __init__(self, send: Sender) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(warning=record.getMessage())


def _log_everything(send: Sender) -> None:
    """Write everything to standard error, the log; send whisperport's warnings to the parent too."""
    faulthandler.enable()
    # A shell starts background jobs with interrupts ignored, but this process must react to interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)
    own = logging.getLogger("whisperport")
    own.setLevel(logging.DEBUG)
    own.propagate = False
    own.addHandler(_ToParent(send))
    own.addHandler(logging.StreamHandler(sys.stderr))


def _end_with_parent(pipe: int, cleans_up: bool) -> None:
    """Wait until the parent ends, for example because it was killed; then end.

    A job without limits is interrupted, so that it can clean up.
    """
    while os.read(pipe, 1):
        pass
    if not cleans_up:
        os._exit(1)
    os.kill(os.getpid(), signal.SIGINT)


def kill_with_parent(parent: int) -> None:
    """Let Linux kill this process when its parent ends, also while native code holds Python's lock."""
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

    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: cpu_s}
    if sys.platform == "linux":
        stacks = STACKS_BYTES * (os.cpu_count() or 1)  # stacks count as data, but are hardly used
        limits[resource.RLIMIT_DATA] = memory_bytes + stacks
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        # At the soft limit of CPU time the process gets SIGXCPU, which tells why; at the hard one SIGKILL.
        later = int(kind == resource.RLIMIT_CPU and lowest != hard)
        resource.setrlimit(kind, (lowest, lowest + later))
