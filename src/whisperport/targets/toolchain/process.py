"""Run the driver with a vendor's SDK in another process, and read its progress.

`prepare` writes what it needs to the work folder: the job, the driver with its kit, and the stage script.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from whisperport.system.atomic import write_atomic
from whisperport.system.child import Child, exit_reason, memory_limit
from whisperport.system.progress import begin_stage
from whisperport.targets.toolchain import driver
from whisperport.targets.toolchain.driver import has_unfinished_stages
from whisperport.targets.toolchain.interpreter import Installed

SCRIPT = "compile.py"  # name of the driver's copy in a work folder
LOG = "driver.log"  # name of the file with the driver's standard error in a work folder
GRACE_S = 5.0  # seconds between the interrupt and the kill of the driver's process group
RAISE_LIMIT = (
    "raise the memory limit, for example with `ulimit -v unlimited`, and repeat the command"
)
AS_TEXT = {"text": True, "encoding": "utf-8", "errors": "replace"}
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


def start_process(installed: Installed, arguments: Sequence[str], **how: Any) -> Child:
    """Start a toolchain's interpreter.

    Args:
        installed: the toolchain.
        arguments: of the interpreter, the script first.
        how: further arguments of `subprocess.Popen`.
    """
    return Child(
        [os.fspath(installed.interpreter), *arguments],
        env={**_environment(installed.interpreter), **installed.environment},
        **how,
    )


def run_driver(toolchain: Installed | Path, work: Path) -> Failure | None:
    """Run the unfinished stages of a prepared work folder.

    The output of every stage is written to `PROGRAM/STAGE.log`, that of the driver to `driver.log`.

    Args:
        toolchain: the toolchain, or the Python interpreter that has its SDK.
        work: the work folder.

    Returns:
        The failure; None if every stage is finished.
    """
    with (work / LOG).open("wb") as stderr:
        arguments = [os.fspath(work / SCRIPT), "--json"]
        running = start_process(_installed(toolchain), arguments, stderr=stderr, **AS_TEXT)
        last: Mapping[str, Any] = {"event": "starting"}
        try:
            assert running.process.stdout is not None
            for last in filter(None, map(_event, running.process.stdout)):
                _show_progress(last)
            code = running.process.wait()
        finally:
            running.end(GRACE_S)
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
    running = start_process(_installed(toolchain), arguments, stderr=subprocess.PIPE, **AS_TEXT)
    try:
        out, err = running.process.communicate(timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return Failure(kind="died", message=f"importing the SDK took longer than {PROBE_S:g} s")
    finally:
        running.end(GRACE_S)
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


def _show_progress(event: Mapping[str, Any]) -> None:
    if event["event"] == "stage":
        begin_stage(f"{event['program']}: {event['stage']}")
    elif event["event"] == "kept":
        begin_stage(f"{event['program']}: {event['stage']} is already finished")


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
            hint=RAISE_LIMIT if code == -signal.SIGABRT and memory_limit() else "",
        )
    return Failure(
        kind=kind,
        message=last["message"],
        program=program,
        stage=stage,
        classes=last.get("classes", ()),
        log=log if kind == "failed" else None,
    )


def _installed(toolchain: Installed | Path) -> Installed:
    return toolchain if isinstance(toolchain, Installed) else Installed(toolchain, toolchain)


def _environment(interpreter: Path) -> dict[str, str]:
    """Return the environment without variables that make another interpreter import this one's packages."""
    if os.fspath(interpreter) == sys.executable:
        return dict(os.environ)
    excluded = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    return {name: value for name, value in os.environ.items() if name not in excluded}


__all__ = ["Job", "Stage", "has_unfinished_stages", "prepare"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of compiling a program. Paths are relative to the program's folder.

    A stage runs again if a file that it reads has changed, or if a file that it wrote is damaged.
    """

    name: str  # also the key of its function in `STAGES` of the stage script
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One program to compile. Its folder in the work folder contains the input of the first stage."""

    name: str
    stages: tuple[Stage, ...]
    # JSON for the stage script. If it changes, every stage runs again. Put the settings of a single stage
    # into a file that this stage reads.
    settings: Mapping[str, Any] = field(default_factory=dict)


def prepare(work: Path, script: Path, settings: Mapping[str, Any], jobs: Sequence[Job]) -> None:
    """Write the job description, the driver with its kit, and the stage script into a work folder.

    Args:
        work: the work folder; each job's own folder in it already contains the files of its program.
        script: path of the vendor's stage script.
        settings: JSON for every stage of every program. If it changes, all stages run again.
        jobs: the programs to compile.
    """
    described = {"settings": settings, "programs": [asdict(job) for job in jobs]}
    write_atomic(work / driver.JOB, json.dumps(described, indent=1).encode("utf-8"))
    write_atomic(work / driver.SCRIPT, script.read_bytes())
    own = Path(driver.__file__)
    write_atomic(work / driver.KIT, own.with_name(driver.KIT).read_bytes())
    write_atomic(work / SCRIPT, own.read_bytes())
