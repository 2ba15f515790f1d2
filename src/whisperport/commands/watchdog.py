"""Run a long job in a child process, and stop it if it hangs.

    this process ── job ──► child     standard output and error go to a log, also those of C++ code
         ◄── stages, warnings ──┤
         ◄── result or error ───┘

The output of compilers never reaches the terminal. A job that reports no new stage for too long is stopped,
even inside C++ code. The child also ends if its parent ends. If the system kills the child, the caller gets
an ordinary error. The log is kept, beside the job's output, only if the exporter failed.
"""

import faulthandler
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from whisperport.bundle.staging import clear_leftovers
from whisperport.errors import LoweringError, MissingPackageError, WhisperportError
from whisperport.system.progress import Progress
from whisperport.system.ranges import check_range

STARTING = "starting"  # the stage before the first one that the job reports
STALL_S = 30 * 60.0  # the longest measured stage, of whisper-base for xnnpack, took 1.5 minutes
MAX_STALL_S = 20 * 24 * 3600.0  # the system can wait for at most 2^31 ms, 24 days
START_S = 60.0  # time to import Python modules and torch on a loaded machine
GRACE_S = 10.0  # time for a child to clean up after an interrupt, before it is killed
DUMP_S = 0.5  # time to write the stacks to the log

log = logging.getLogger(__name__)


def run_watched(
    job: Callable[..., Any],
    *arguments: Any,
    out: Path,
    writes: Path | None = None,
    progress: Progress = lambda _: None,
    stall_s: float = STALL_S,
) -> Any:
    """Call `job(*arguments, progress=...)` in a child process, and return its result.

    Args:
        job: a function defined at the top level of a module. Its arguments and result can be pickled.
        arguments: arguments of the job.
        out: file or folder that the job writes. The log of a failure is written beside it, to `OUT.log`.
        writes: another output of the job. Its temporary files are deleted too if the job is killed.
            Default: None.
        progress: called with the name of each stage, a few words.
        stall_s: time in seconds without a new stage after which the job is stopped, 0 to `MAX_STALL_S`.
            Default: 1800, 30 minutes.

    Raises:
        UsageError: `stall_s` is out of range.
        LoweringError: an exporter failed, or the job crashed, was killed, or hung; the hint names the log.
        WhisperportError: any other error that the job raised.
    """
    check_range("stall_s", stall_s, 0, MAX_STALL_S)
    outputs = tuple(Path(os.path.abspath(path)) for path in (out, writes) if path)
    watch = _Watch.start(job, arguments, outputs)
    try:
        return watch.listen(progress, stall_s)
    except WhisperportError as error:
        failure = error
    finally:
        watch.stop()
        log_path = watch.close()
    if log_path:
        log_hint = f"the complete log is in {log_path}"
        failure.hint = f"{failure.hint}; {log_hint}" if failure.hint else log_hint
    raise failure


@dataclass(slots=True)
class _Watch:
    """One child process and its state."""

    process: BaseProcess
    pipe: Connection
    log: Path
    outputs: tuple[Path, ...]  # the log is written beside the first output
    stage: str = STARTING
    keeps_log: bool = False

    @classmethod
    def start(
        cls, job: Callable[..., Any], arguments: tuple[Any, ...], outputs: tuple[Path, ...]
    ) -> "_Watch":
        # Not a fork: libraries that are loaded here would deadlock there, because a fork has no threads.
        context = multiprocessing.get_context("spawn")
        descriptor, log_path = tempfile.mkstemp(prefix="whisperport-", suffix=".log")
        os.close(descriptor)
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(sender, log_path, job, arguments))
        try:
            with _ignored_interrupts():
                process.start()
        except BaseException:
            os.unlink(log_path)
            raise
        sender.close()
        return cls(process, receiver, Path(log_path), outputs)

    def listen(self, progress: Progress, stall_s: float) -> Any:
        """Receive messages until the job ends, and return its result or raise its error."""
        while True:
            limit_s = max(stall_s, START_S) if self.stage == STARTING else stall_s
            if not self.pipe.poll(limit_s):
                raise self._with_log(self._stalled(limit_s))
            try:
                kind, value = self.pipe.recv()
            except (EOFError, OSError):
                raise self._with_log(self._died()) from None
            if kind == "stage":
                self.stage = value
                progress(value)
            elif kind == "warning":
                log.warning("%s", value)
            elif kind == "interrupted":
                raise KeyboardInterrupt
            elif kind == "failed":
                raise self._with_log(value)
            else:
                return value

    def _with_log(self, error: WhisperportError) -> WhisperportError:
        """Keep the log if an exporter failed, because the log then has more details than the error."""
        if isinstance(error, LoweringError) and not isinstance(error, MissingPackageError):
            self.keeps_log = True
        return error

    def _stalled(self, stall_s: float) -> LoweringError:
        if hasattr(signal, "SIGUSR1") and self.process.pid:
            os.kill(self.process.pid, signal.SIGUSR1)  # the child writes its stacks to the log
            time.sleep(DUMP_S)
        return LoweringError(
            f"stopped: `{self.stage}` made no progress",
            why=f"it reported nothing for {_duration(stall_s)}",
            hint="`--stall-after` allows more time; the end of the log shows where it hung",
        )

    def _died(self) -> LoweringError:
        self.process.join(GRACE_S)
        code = self.process.exitcode
        if code == -signal.SIGKILL:
            return LoweringError(
                f"the system killed the exporter in `{self.stage}`",
                why="probably memory ran out",
                hint="free some memory, or use a machine with more",
            )
        end = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return LoweringError(
            f"the exporter crashed in `{self.stage}`",
            why=f"it ended with {end}; this is a defect of a library that it uses",
        )

    def stop(self) -> None:
        """End the child: interrupt it so that it can clean up, and kill it if it does not end in time."""
        if self.stage == STARTING:  # it only imports modules so far, and has nothing to clean up
            self.process.kill()
        if self.process.is_alive() and self.process.pid:
            self.process.join(DUMP_S)  # a child that has sent its result ends soon
        if self.process.is_alive() and self.process.pid:
            os.kill(self.process.pid, signal.SIGINT)
            self.process.join(GRACE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def close(self) -> Path | None:
        """Delete the temporary files of a killed child; return the path of its log if it is kept."""
        self.pipe.close()
        for out in {*self.outputs, *(Path(os.path.realpath(path)) for path in self.outputs)}:
            with suppress(OSError):  # the next writer of this output deletes them
                clear_leftovers(out)
        if not self.keeps_log or not self.log.stat().st_size:
            self.log.unlink(missing_ok=True)
            return None
        beside = self.outputs[0].with_name(f"{self.outputs[0].name}.log")
        try:
            shutil.copyfile(self.log, beside)
        except OSError:  # if the log cannot be copied there, it stays in the temporary folder
            return self.log
        self.log.unlink()
        return beside


@contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Let a child that is started in the block ignore Ctrl-C until its job begins.

    Otherwise it would print a traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:g} seconds"


# The functions below run in the child.


def _child(pipe: Connection, log_path: str, job: Callable[..., Any], arguments: Any) -> None:
    log_file = open(log_path, "ab", buffering=0)  # noqa: SIM115  # open until the process ends
    for stream in (1, 2):
        os.dup2(log_file.fileno(), stream)
    faulthandler.enable(log_file)
    # A shell starts background jobs with interrupts ignored, but this process must react to interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, log_file)
    sender = _Sender(pipe)
    _forward_log(sender)
    threading.Thread(target=_end_with_parent, args=(log_path,), daemon=True).start()
    try:
        result = job(*arguments, progress=lambda stage: _enter(stage, sender))
        sender("done", result)
    except KeyboardInterrupt:
        sender("interrupted", None)
    except BaseException as error:
        traceback.print_exc()
        sender("failed", _sendable(error))


def _enter(stage: str, sender: "_Sender") -> None:
    print(f"[{stage}]", flush=True)  # into the log
    sender("stage", stage)


class _Sender:
    """Sends messages to the parent, one at a time, from any thread."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def __call__(self, kind: str, value: Any) -> None:
        with self._lock:
            self._pipe.send((kind, value))


class _ToParent(logging.Handler):
    def __init__(self, sender: _Sender) -> None:
        super().__init__(logging.WARNING)
        self._sender = sender

    def emit(self, record: logging.LogRecord) -> None:
        self._sender("warning", record.getMessage())


def _forward_log(sender: _Sender) -> None:
    """Send whisperport's warnings to the parent, which shows them; all log messages go to the log file."""
    own = logging.getLogger("whisperport")
    own.setLevel(logging.DEBUG)
    own.propagate = False
    own.addHandler(_ToParent(sender))
    own.addHandler(logging.StreamHandler(sys.stderr))


def _end_with_parent(log_path: str) -> None:
    """Wait until the parent ends, for example because it was killed; then delete the log and end."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        Path(log_path).unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGINT)


def _sendable(error: BaseException) -> WhisperportError:
    """Return `error` if it is a WhisperportError that can be pickled, or else an equivalent one."""
    if isinstance(error, WhisperportError):
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # the error has an attribute that cannot be pickled
            return LoweringError(error.what, why=error.why, hint=error.hint)
        return error
    return LoweringError(
        "whisperport failed with an unexpected error",
        why=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}",
        hint="this is a defect of whisperport: please report it with the log",
    )
