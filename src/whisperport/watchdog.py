"""Run a long job in a process of its own, and watch it.

    this process ── job ──► child     standard output and error go to a log, C++'s too
         ◄── stages, warnings ──┤
         ◄── result or error ───┘

A compiler's flood never reaches the screen. A stage that says nothing for too long is stopped, even
in the middle of C++; so is a child whose parent died. A child that the system kills is an error as
any other. The log is kept, beside what was to be written, only if the exporter failed.
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
from whisperport.progress import Progress
from whisperport.ranges import check_range

STARTING = "starting"  # until the first stage is said
STALL_S = 30 * 60.0  # the longest stage seen, of whisper-base for xnnpack, took a minute and a half
MAX_STALL_S = 20 * 24 * 3600.0  # the system waits for at most 2^31 ms, 24 days
START_S = 60.0  # for Python and torch to be imported, on a machine that is busy
GRACE_S = 10.0  # for a child to tidy up after an interrupt, before it is killed
DUMP_S = 0.5  # for the stacks to be written

log = logging.getLogger(__name__)


def run_watched(
    job: Callable[..., Any],
    *arguments: Any,
    out: Path,
    writes: Path | None = None,
    progress: Progress = lambda _: None,
    stall_s: float = STALL_S,
) -> Any:
    """`job(*arguments, say=say)` in a process of its own; whatever it returns or raises.

    Args:
        job: a function of a module, whose arguments and result can be pickled.
        out: the file or folder that the job writes; a log of a failure is put beside it, as `out` + `.log`.
        writes: another output of the job, whose leftovers are cleared too if it is killed.
        stall_s: seconds without a new stage after which the job is stopped.

    Raises:
        UsageError: `stall_s` is negative, not a number, or above `MAX_STALL_S`.
        LoweringError: the job failed as an exporter does, crashed, was killed, or hung; the hint
            names the log.
        WhisperportError: whatever else the job raised.
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
        kept = watch.close()
    if kept:
        said = f"all that was said is in {kept}"
        failure.hint = f"{failure.hint}; {said}" if failure.hint else said
    raise failure


@dataclass(slots=True)
class _Watch:
    """One child, and what is known of it."""

    process: BaseProcess
    pipe: Connection
    log: Path
    outputs: tuple[Path, ...]  # the log is put beside the first
    stage: str = STARTING
    keeps_log: bool = False

    @classmethod
    def start(
        cls, job: Callable[..., Any], arguments: tuple[Any, ...], outputs: tuple[Path, ...]
    ) -> "_Watch":
        # Not a fork: libraries that were loaded here with their threads would deadlock there.
        context = multiprocessing.get_context("spawn")
        descriptor, log_path = tempfile.mkstemp(prefix="whisperport-", suffix=".log")
        os.close(descriptor)
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(theirs, log_path, job, arguments))
        try:
            with _ignored_interrupts():
                process.start()
        except BaseException:
            os.unlink(log_path)
            raise
        theirs.close()
        return cls(process, ours, Path(log_path), outputs)

    def listen(self, progress: Progress, stall_s: float) -> Any:
        """The job's result; raises why there is none."""
        while True:
            limit_s = max(stall_s, START_S) if self.stage == STARTING else stall_s
            if not self.pipe.poll(limit_s):
                raise self._kept(self._stalled(limit_s))
            try:
                kind, value = self.pipe.recv()
            except (EOFError, OSError):
                raise self._kept(self._died()) from None
            if kind == "stage":
                self.stage = value
                progress(value)
            elif kind == "warning":
                log.warning("%s", value)
            elif kind == "interrupted":
                raise KeyboardInterrupt
            elif kind == "failed":
                raise self._kept(value)
            else:
                return value

    def _kept(self, error: WhisperportError) -> WhisperportError:
        """Note whether the log says more than this error does: it does if an exporter failed."""
        if isinstance(error, LoweringError) and not isinstance(error, MissingPackageError):
            self.keeps_log = True
        return error

    def _stalled(self, stall_s: float) -> LoweringError:
        if hasattr(signal, "SIGUSR1") and self.process.pid:
            os.kill(self.process.pid, signal.SIGUSR1)  # the child writes its stacks to the log
            time.sleep(DUMP_S)
        return LoweringError(
            f"stopped: `{self.stage}` made no progress",
            why=f"nothing was heard of it for {_said(stall_s)}",
            hint="`--stall-after` gives it longer; where it hung is at the end of the log",
        )

    def _died(self) -> LoweringError:
        self.process.join(GRACE_S)
        code = self.process.exitcode
        if code == -signal.SIGKILL:
            return LoweringError(
                f"the system killed the exporter in `{self.stage}`",
                why="most likely memory ran out",
                hint="free some memory, or use a machine with more",
            )
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return LoweringError(
            f"the exporter crashed in `{self.stage}`",
            why=f"it ended with {how}, which is a defect of a library it uses",
        )

    def stop(self) -> None:
        """End the child: by an interrupt, so that it tidies up; by force if it does not."""
        if self.stage == STARTING:  # it imports, and has nothing to tidy up
            self.process.kill()
        if self.process.is_alive() and self.process.pid:
            self.process.join(DUMP_S)  # one that has sent its result is about to end
        if self.process.is_alive() and self.process.pid:
            os.kill(self.process.pid, signal.SIGINT)
            self.process.join(GRACE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def close(self) -> Path | None:
        """Clear what a killed child has left, and return where its log was put, if it is kept."""
        self.pipe.close()
        for out in {*self.outputs, *(Path(os.path.realpath(path)) for path in self.outputs)}:
            with suppress(OSError):  # the next writer of this output clears it
                clear_leftovers(out)
        if not self.keeps_log or not self.log.stat().st_size:
            self.log.unlink(missing_ok=True)
            return None
        beside = self.outputs[0].with_name(f"{self.outputs[0].name}.log")
        try:
            shutil.copyfile(self.log, beside)
        except OSError:  # where nothing can be written, the log stays where it is
            return self.log
        self.log.unlink()
        return beside


@contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """A child started here ignores Ctrl-C until its job begins: else it would print where it was."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _said(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:g} seconds"


# In the child.


def _child(pipe: Connection, log_path: str, job: Callable[..., Any], arguments: Any) -> None:
    chatter = open(log_path, "ab", buffering=0)  # noqa: SIM115  # until the process ends
    for stream in (1, 2):
        os.dup2(chatter.fileno(), stream)
    faulthandler.enable(chatter)
    # A shell starts background jobs with interrupts ignored; this one must be able to be stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, chatter)
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
    """Sends one message at a time, from any thread."""

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
    """Our own warnings are for the person; everything else is for the log."""
    ours = logging.getLogger("whisperport")
    ours.setLevel(logging.DEBUG)
    ours.propagate = False
    ours.addHandler(_ToParent(sender))
    ours.addHandler(logging.StreamHandler(sys.stderr))


def _end_with_parent(log_path: str) -> None:
    """A parent that was killed cannot say so; its child must not go on for hours, nor leave the log."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        Path(log_path).unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGINT)


def _sendable(error: BaseException) -> WhisperportError:
    """The error itself if it is ours and survives the way to the parent."""
    if isinstance(error, WhisperportError):
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an attribute of its own that cannot be sent
            return LoweringError(error.what, why=error.why, hint=error.hint)
        return error
    return LoweringError(
        "the export failed in a way that whisperport does not know",
        why=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}",
        hint="this is a defect: please report it with the log",
    )
