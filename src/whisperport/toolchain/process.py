"""Run the driver with a vendor's SDK in another process, and read its progress."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from whisperport.system.progress import Progress
from whisperport.toolchain import driver
from whisperport.toolchain.interpreter import Installed

SCRIPT = "compile.py"  # name of the driver's copy in a work folder
LOG = "driver.log"  # name of the file with the driver's standard error in a work folder
GRACE_S = 5.0  # seconds between the interrupt and the kill of the driver's process group
RAISE_LIMIT = (
    "raise the memory limit, for example with `ulimit -v unlimited`, and repeat the command"
)
PROBE_S = 300.0  # time limit in seconds; importing an SDK with TensorFlow takes tens of seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a toolchain did not finish its job."""

    # missing: no SDK. unsuitable: the SDK does not support the job. failed: a stage raised an exception.
    # died: the process ended without a result.
    kind: Literal["missing", "unsuitable", "failed", "died"]
    message: str
    program: str = ""
    stage: str = ""
    classes: Sequence[str] = ()  # names of the exception's class and of its base classes
    log: Path | None = None
    hint: str = ""  # what to do, as far as the end of the process tells


@dataclass(slots=True)
class _Driver:
    """A running driver process, in a process group of its own."""

    process: "subprocess.Popen[str]"

    @classmethod
    def start(cls, installed: Installed, arguments: Sequence[str], stderr: Any) -> "_Driver":
        how = {"text": True, "encoding": "utf-8", "errors": "replace"}
        return cls(start_process(installed, arguments, stderr=stderr, **how))

    def events(self) -> Iterator[Mapping[str, Any]]:
        """Yield the driver's events. Lines that are not JSON objects were printed by the SDK: skip them."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if event := _event(line):
                yield event

    def stop(self) -> None:
        """End the driver if it is running: interrupt it, and kill its process group after `GRACE_S`."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
            kill_group(self.process)  # the SDK's child processes may ignore an interrupt
        _close_pipes(self.process)


def start_process(
    installed: Installed, arguments: Sequence[str], **how: Any
) -> "subprocess.Popen[Any]":
    """Start a toolchain's interpreter in a process group of its own, with pipes for input and output.

    Args:
        installed: the toolchain.
        arguments: of the interpreter, the script first.
        how: further arguments of `subprocess.Popen`.
    """
    return subprocess.Popen(
        [os.fspath(installed.interpreter), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**_environment(installed.interpreter), **installed.environment},
        start_new_session=True,  # Ctrl-C in a terminal does not reach it
        **how,
    )


def kill_process(process: "subprocess.Popen[Any]") -> None:
    """Kill the process group of `start_process` if it is running, and close the pipes."""
    if process.poll() is None:
        kill_group(process)
    _close_pipes(process)


def exit_reason(code: int) -> str:
    """Return why a process ended, in words."""
    if code == -signal.SIGKILL:
        return "the system killed the process, most likely because memory ran out"
    if code == -signal.SIGABRT and (limit := _memory_limit()):
        return (
            "the vendor's library aborted (SIGABRT), most likely because the process may use at most "
            f"{limit / 1e9:.1f} GB of memory (`ulimit -v`)"
        )
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with exit status {code} and did not report a result"


def run_driver(toolchain: Installed | Path, work: Path, progress: Progress) -> Failure | None:
    """Run the unfinished stages of a prepared work folder.

    The output of every stage is written to `PROGRAM/STAGE.log`, that of the driver to `driver.log`.

    Args:
        toolchain: the toolchain, or the Python interpreter that has its SDK.
        work: the work folder.
        progress: called with the program and the name of each stage.

    Returns:
        The failure; None if every stage is finished.
    """
    with (work / LOG).open("wb") as stderr:
        running = _Driver.start(_installed(toolchain), [os.fspath(work / SCRIPT), "--json"], stderr)
        last: Mapping[str, Any] = {"event": "starting"}
        try:
            for last in running.events():
                _show_progress(last, progress)
            code = running.process.wait()
        finally:
            running.stop()
    if code == 0 and last["event"] == "done":
        return None
    return _failure(last, code, work)


def probe(toolchain: Installed | Path, script: Path, settings: Mapping[str, Any]) -> Failure | None:
    """Check that a toolchain has its SDK in a version that supports these settings.

    Args:
        toolchain: the toolchain, or the Python interpreter that has its SDK.
        script: path of the vendor's stage script.
        settings: JSON for every stage.

    Returns:
        The failure; None if the SDK is usable.
    """
    arguments = [driver.__file__, "--probe", os.fspath(script), json.dumps(settings)]
    running = _Driver.start(_installed(toolchain), arguments, subprocess.PIPE)
    try:
        out, err = running.process.communicate(timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return Failure(kind="died", message=f"importing the SDK took longer than {PROBE_S:g} s")
    finally:
        running.stop()
    for line in out.splitlines():
        event = _event(line)
        if event.get("event") in ("missing", "unsuitable"):
            return Failure(kind=event["event"], message=event["message"])
        if event.get("event") == "found":
            return None
    return Failure(
        kind="died", message=(err.strip().splitlines() or ["the process printed nothing"])[-1]
    )


def _event(line: str) -> Mapping[str, Any]:
    """Return the event in a line of the driver's output; empty for a line that the SDK printed."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) and "event" in event else {}


def _show_progress(event: Mapping[str, Any], progress: Progress) -> None:
    if event["event"] == "stage":
        progress(f"{event['program']}: {event['stage']}")
    elif event["event"] == "kept":
        progress(f"{event['program']}: {event['stage']} is already finished")


def _failure(last: Mapping[str, Any], code: int, work: Path) -> Failure:
    program, stage = last.get("program", ""), last.get("stage", "")
    log = work / program / f"{stage}.log" if stage else work / LOG
    kind = last["event"]
    if kind == "damaged":
        return Failure(kind="died", message=last["message"], log=work / LOG)
    if kind not in ("missing", "unsuitable", "failed"):
        return Failure(
            kind="died",
            message=exit_reason(code),
            program=program,
            stage=stage,
            log=log,
            hint=RAISE_LIMIT if code == -signal.SIGABRT and _memory_limit() else "",
        )
    return Failure(
        kind=kind,
        message=last["message"],
        program=program,
        stage=stage,
        classes=last.get("classes", ()),
        log=log if kind == "failed" else None,
    )


def kill_group(process: "subprocess.Popen[Any]") -> None:
    """Kill a process of `start_process` with all processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _close_pipes(process: "subprocess.Popen[Any]") -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with suppress(OSError):  # the process did not read everything
                stream.close()


def _memory_limit() -> int | None:
    """Return the limit on the address space of this process and its children in bytes; None: no limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _installed(toolchain: Installed | Path) -> Installed:
    return toolchain if isinstance(toolchain, Installed) else Installed(toolchain, toolchain)


def _environment(interpreter: Path) -> dict[str, str]:
    """Return the environment without variables that make another interpreter import this one's packages."""
    if os.fspath(interpreter) == sys.executable:
        return dict(os.environ)
    excluded = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    return {name: value for name, value in os.environ.items() if name not in excluded}
