"""Run the driver in the interpreter that has a vendor's SDK, and listen to its progress."""

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

from whisperport.progress import Progress
from whisperport.toolchain import driver

SCRIPT = "compile.py"  # the driver's copy in a work folder
LOG = "driver.log"  # in a work folder: standard error of the driver itself
GRACE_S = 5.0  # for the driver to end after an interrupt, before its group is killed
PROBE_S = 300.0  # an SDK that imports TensorFlow takes tens of seconds to be imported


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a toolchain did not finish its job."""

    kind: Literal["missing", "unsuitable", "failed", "died"]
    message: str
    program: str = ""
    stage: str = ""
    classes: Sequence[str] = ()  # of the exception that the SDK raised, its own first
    log: Path | None = None


@dataclass(slots=True)
class _Driver:
    """One running driver; its group is interrupted, then killed, when the block is left early."""

    process: "subprocess.Popen[str]"

    @classmethod
    def start(cls, interpreter: Path, arguments: Sequence[str], stderr: Any) -> "_Driver":
        return cls(
            subprocess.Popen(
                [os.fspath(interpreter), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                encoding="utf-8",
                errors="replace",
                env=_environment(interpreter),
                start_new_session=True,  # Ctrl-C in a terminal reaches it through `stop` only
            )
        )

    def events(self) -> Iterator[Mapping[str, Any]]:
        """Every line of progress; what is no JSON object was printed by something else."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and "event" in event:
                yield event

    def stop(self) -> None:
        """End it if it is still running: by an interrupt, and after a grace time by force."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
            with suppress(ProcessLookupError):  # children of the SDK may ignore an interrupt
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def run_driver(interpreter: Path, work: Path, progress: Progress) -> Failure | None:
    """Do what is left of a prepared work folder; None: everything is done.

    The output of every stage is kept in `PROGRAM/STAGE.log`, that of the driver in `driver.log`.
    """
    with (work / LOG).open("wb") as stderr:
        running = _Driver.start(interpreter, [os.fspath(work / SCRIPT), "--json"], stderr)
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


def probe(interpreter: Path, script: Path, settings: Mapping[str, Any]) -> Failure | None:
    """Whether an interpreter has the SDK, of a version that serves these settings; None: it does."""
    arguments = [driver.__file__, "--probe", os.fspath(script), json.dumps(settings)]
    running = _Driver.start(interpreter, arguments, subprocess.PIPE)
    try:
        out, err = running.process.communicate(timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return Failure(kind="died", message=f"its SDK was not imported within {PROBE_S:g} s")
    finally:
        running.stop()
    for line in out.splitlines():
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("event") in ("missing", "unsuitable"):
            return Failure(kind=event["event"], message=event["message"])
        if event.get("event") == "found":
            return None
    return Failure(kind="died", message=(err.strip().splitlines() or ["it printed nothing"])[-1])


def _show_progress(event: Mapping[str, Any], progress: Progress) -> None:
    if event["event"] == "stage":
        progress(f"{event['program']}: {event['stage']}")
    elif event["event"] == "kept":
        progress(f"{event['program']}: {event['stage']} was done before, and is kept")


def _failure(last: Mapping[str, Any], code: int, work: Path) -> Failure:
    program, stage = last.get("program", ""), last.get("stage", "")
    log = work / program / f"{stage}.log" if stage else work / LOG
    kind = last["event"]
    if kind not in ("missing", "unsuitable", "failed"):
        return Failure(
            kind="died", message=_exit_reason(code), program=program, stage=stage, log=log
        )
    return Failure(
        kind=kind,
        message=last["message"],
        program=program,
        stage=stage,
        classes=last.get("classes", ()),
        log=log if kind == "failed" else None,
    )


def _exit_reason(code: int) -> str:
    if code == -signal.SIGKILL:
        return "the system killed it, most likely because memory ran out"
    if code < 0:
        return f"it ended with {signal.Signals(-code).name}"
    return f"it ended with exit status {code} and no last line"


def _environment(interpreter: Path) -> dict[str, str]:
    """Without what would make another interpreter import the packages of this one."""
    if os.fspath(interpreter) == sys.executable:
        return dict(os.environ)
    excluded = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    return {name: value for name, value in os.environ.items() if name not in excluded}
