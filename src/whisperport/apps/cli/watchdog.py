"""Run a long job in a child process, and stop it if it hangs.

The output of compilers never reaches the terminal: it goes to a log. A job that reports no new stage for
too long is stopped, even inside C++ code. The child also ends if its parent ends. If the system kills the
child, the caller gets an ordinary error. The log has no name, so that nothing of it is left if both are
killed. It is copied beside the job's output only if the exporter failed.
"""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from whisperport.errors import LoweringError, MissingPackageError
from whisperport.program.bundle.staging import clear_leftovers
from whisperport.system.child import (
    Job,
    StalledError,
    StoppedError,
    exit_reason,
    pickled,
    result_of,
    unpickled,
)
from whisperport.system.option import check_range

STARTING = "starting"  # the stage before the first one that the job reports
STALL_S = 30 * 60.0  # the longest measured stage, of whisper-base for xnnpack, took 1.5 minutes
MAX_STALL_S = 20 * 24 * 3600.0
START_S = 60.0  # time to import Python modules and torch on a loaded machine
GRACE_S = 10.0  # time for a child to clean up after an interrupt, before it is killed
DUMP_S = 0.5  # time to write the stacks to the log


def run_watched(
    job: Callable[..., Any],
    *arguments: Any,
    out: Path,
    writes: Path | None = None,
    stall_s: float = STALL_S,
) -> Any:
    """Call `job(*arguments)` in a child process, and return its result.

    Its stages are also those of this process.

    Args:
        job: a function defined at the top level of a module. Its arguments and result can be pickled.
        arguments: arguments of the job.
        out: file or folder that the job writes. The log of a failure is written beside it, to `OUT.log`.
        writes: another output of the job. Its temporary files are deleted too if the job is killed.
            Default: None.
        stall_s: time in seconds without a new stage after which the job is stopped, 0 to `MAX_STALL_S`.
            Default: 1800, 30 minutes.

    Raises:
        UsageError: `stall_s` is out of range.
        LoweringError: an exporter failed, or the job crashed, was killed, or hung; the hint names the log.
        WhisperportError: any other error that the job raised.
    """
    check_range("stall_s", stall_s, 0, MAX_STALL_S)
    outputs = tuple(Path(os.path.abspath(path)) for path in (out, writes) if path)
    with tempfile.TemporaryFile() as log:
        try:
            child = Job({"pickled": pickled((job, arguments))}, log)
            try:
                return _result(child, stall_s)
            finally:
                # As long as it only imports modules, it has nothing to clean up.
                child.end(GRACE_S if child.stage else 0.0)
                _clear(outputs)
        except LoweringError as error:
            keeps_log = not isinstance(error, MissingPackageError)
            if keeps_log and (copy := _copied(log, outputs[0])):
                log_hint = f"the complete log is in {copy}"
                error.hint = f"{error.hint}; {log_hint}" if error.hint else log_hint
            raise


def _result(child: Job, stall_s: float) -> Any:
    """Wait until the job ends, and return its result or raise its error."""
    start_s = max(stall_s, START_S)
    try:
        child.wait(start_s, stall_s, each_stage=True)
        if child.answer is None:
            raise _died(child)
        return unpickled(result_of(child.answer))
    except StalledError:
        raise _stalled(child, stall_s if child.stage else start_s) from None
    except StoppedError as error:
        raise LoweringError(
            "whisperport failed with an unexpected error",
            why=str(error),
            hint="this is a defect of whisperport: please report it with the log",
        ) from None


def _stalled(child: Job, stall_s: float) -> LoweringError:
    if hasattr(signal, "SIGUSR1"):
        child.process.send_signal(signal.SIGUSR1)  # the child writes its stacks to the log
        time.sleep(DUMP_S)
    return LoweringError(
        f"stopped: `{child.stage or STARTING}` made no progress",
        why=f"it reported nothing for {_duration(stall_s)}",
        hint="`--stall-after` allows more time; the end of the log shows where it hung",
    )


def _died(child: Job) -> LoweringError:
    code, stage = child.exit_code(), child.stage or STARTING
    if code == -signal.SIGKILL:
        return LoweringError(
            f"the system killed the exporter in `{stage}`",
            why="probably memory ran out",
            hint="free some memory, or use a machine with more",
        )
    return LoweringError(
        f"the exporter crashed in `{stage}`",
        why=exit_reason(code),
        hint="if no input was changed meanwhile, this is a defect of a library that it uses",
    )


def _clear(outputs: tuple[Path, ...]) -> None:
    """Delete the temporary files that a killed child left beside its outputs."""
    for out in {*outputs, *(Path(os.path.realpath(path)) for path in outputs)}:
        with suppress(OSError):  # the next writer of this output deletes them
            clear_leftovers(out)


def _copied(log: IO[bytes], out: Path) -> str:
    """Copy the log beside the output, or, if that cannot be written, to the temporary files.

    Returns:
        The path of the copy; empty: the log is empty, or there is no room for it.
    """
    if not log.seek(0, os.SEEK_END):
        return ""

    beside = out.with_name(f"{out.name}.log")
    places: tuple[Callable[[], IO[bytes]], ...] = (
        lambda: beside.open("xb"),
        lambda: tempfile.NamedTemporaryFile(  # noqa: SIM115  # closed below
            prefix="whisperport-", suffix=".log", delete=False
        ),
    )
    for new_file in places:
        with suppress(OSError):
            file = new_file()
            try:
                with file:
                    log.seek(0)
                    shutil.copyfileobj(log, file)
                return str(file.name)
            except OSError:  # the disk is full, and half a log would be in the way
                os.unlink(file.name)
    return ""


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:g} seconds"
