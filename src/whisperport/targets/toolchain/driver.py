"""Run a vendor's compile stages in a work folder. Finished stages are not run again.

This file is used for every vendor's compiler. It needs only the standard library of Python 3.9 or later,
`kit.py` and the vendor's stage script beside it, and the vendor's SDK; it does not import whisperport. The
file `compile.py` that `whisperport compile` writes into a work folder is a copy of it, to be run on a
machine that has the SDK.

    work folder/
    ├── job.json      the settings, and the stages of every program with the files they read and write
    ├── state.json    hashes of the files that every finished stage read and wrote
    ├── compile.py    a copy of this file
    ├── kit.py        what the stages of several compilers share
    ├── stages.py     the vendor's stage script
    └── encoder/      one folder per program, with its files and STAGE.log of every stage

If the settings have `requires`, the SDK's version is compared with it; see `version_fault` of kit.py. The
stage script defines:

    version()                     returns the SDK's version, "" if unknown; raises ImportError without SDK
    check(version, settings)      optional: returns why this SDK does not support these settings; "" if
                                  it does
    STAGES[name](job, kit)        runs one stage of a program; `job` is a `Job` of kit.py
    load(files)                     optional: loads a program that the stages made, for `--serve`; returns a
                                    function: input name -> array, to a list of the outputs

    python compile.py             runs unfinished stages and prints a line of text per stage
    python compile.py --json      prints a JSON object per line; stops when standard input closes
    python driver.py --probe STAGES.PY SETTINGS       checks that the SDK supports these settings
    python driver.py --serve STAGES.PY SETTINGS       runs the programs in `settings["programs"]` on arrays

With `--serve`, both directions are messages: a JSON object on one line, then as many bytes as its `bytes`
says, an `.npz` file of arrays. The process ends when standard input closes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

JOB, STATE, SCRIPT, KIT = "job.json", "state.json", "stages.py", "kit.py"
CHUNK = 1 << 20
GRACE_S = 5.0  # seconds that a stage may take to end after an interrupt, before it is killed
LONGEST_MESSAGE = 300

Report = Callable[..., Any]
"""Prints one event as a line of progress; called with the event's name and its facts."""


JsonObject = Mapping[str, Any]
"""A JSON object of `job.json` or `state.json`."""


class StopError(Exception):
    """The job cannot continue; the reason has been reported."""


def run(folder: Path, report: Report) -> None:
    """Run every unfinished stage of a work folder's job.

    Raises:
        StopError: the job's description is damaged, the SDK is missing or does not support this job, or a
            stage failed.
    """
    try:
        job = _job(folder)
    except (OSError, ValueError, RecursionError) as error:
        message = (
            f"{JOB} is missing or damaged ({_first_line(error)}); run `whisperport compile` again"
        )
        report("damaged", message=message)
        raise StopError from error
    vendor = None
    for program in job["programs"]:
        for stage in program["stages"]:
            identity = {"program": program["name"], "stage": stage["name"]}
            if is_finished(folder, job, program, stage):
                report("kept", **identity)
                continue
            if vendor is None:
                vendor = _load_vendor(folder / SCRIPT, job["settings"], report)
            report("stage", **identity)
            _run_stage(vendor, folder, job, program, stage, report)


def has_unfinished_stages(folder: Path) -> bool:
    """Whether at least one stage of a work folder's job is not finished."""
    job = _job(folder)
    return not all(
        is_finished(folder, job, program, stage)
        for program in job["programs"]
        for stage in program["stages"]
    )


def is_finished(folder: Path, job: JsonObject, program: JsonObject, stage: JsonObject) -> bool:
    """Whether a stage was run with exactly these inputs, and the files that it wrote are unchanged."""
    recorded = _state(folder).get(program["name"], {}).get(stage["name"])
    program_folder = folder / program["name"]
    files = [program_folder / name for name in [*stage["reads"], *stage["writes"]]]
    if not recorded or not all(file.is_file() for file in files):
        return False
    written = {name: _sha256(program_folder / name) for name in stage["writes"]}
    return bool(
        recorded["made"] == written and recorded["from"] == _inputs(folder, job, program, stage)
    )


def _run_stage(
    vendor: Any,
    folder: Path,
    job: JsonObject,
    program: JsonObject,
    stage: JsonObject,
    report: Report,
) -> None:
    """Run one stage. Its output goes to the stage's log, including the output of C++ code."""
    program_folder = folder / program["name"]
    identity = {"program": program["name"], "stage": stage["name"]}
    kit = _kit()
    stage_job = kit.Job(program_folder, program["name"], program["settings"], job["settings"])
    try:
        with _output_to(program_folder / (stage["name"] + ".log")) as log:
            try:
                vendor.STAGES[stage["name"]](stage_job, kit)
            except Exception:
                log.write(traceback.format_exc().encode("utf-8", "backslashreplace"))
                raise
        _record_finished(folder, job, program, stage, vendor.version())
    except Exception as error:  # the exceptions of an SDK have no common base class but Exception
        classes = [kind.__name__ for kind in type(error).__mro__]
        report("failed", classes=classes, message=_first_line(error), **identity)
        raise StopError from error


def _load_vendor(script: Path, settings: Any, report: Report) -> Any:
    """Import the stage script, and check that its SDK is installed and supports these settings."""
    vendor = _imported(script)
    try:
        version = vendor.version()
    except ImportError as error:
        report("missing", message=str(error))
        raise StopError from error
    required = settings.get("requires")
    reason = _kit().version_fault(version, required) if required else ""
    if not reason and hasattr(vendor, "check"):
        reason = vendor.check(version, settings)
    if reason:
        report("unsuitable", message=reason)
        raise StopError
    report("found", version=version)
    return vendor


def _kit() -> Any:
    return _imported(Path(__file__).resolve().with_name(KIT))


def _imported(file: Path) -> Any:
    """Import a file by its path."""
    spec = importlib.util.spec_from_file_location(file.stem, str(file))
    assert spec is not None and spec.loader is not None  # noqa: PT018  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _job(folder: Path) -> Any:
    """Read the job.

    Raises:
        OSError, RecursionError, ValueError: the file is missing or damaged.
    """
    job = json.loads((folder / JOB).read_text(encoding="utf-8"))
    try:
        for program in job["programs"]:
            for stage in program["stages"]:
                stage["name"], list(stage["reads"]), list(stage["writes"])
            program["name"], program["settings"]
        job["settings"]
    except (TypeError, LookupError) as error:
        raise ValueError("it is not the description of a job") from error
    return job


def _inputs(folder: Path, job: JsonObject, program: JsonObject, stage: JsonObject) -> JsonObject:
    program_folder = folder / program["name"]
    hashes = {name: _sha256(program_folder / name) for name in stage["reads"]}
    return {"settings": [job["settings"], program["settings"]], "files": hashes}


def _record_finished(
    folder: Path, job: JsonObject, program: JsonObject, stage: JsonObject, version: str
) -> None:
    program_folder, state = folder / program["name"], _state(folder)
    state.setdefault(program["name"], {})[stage["name"]] = {
        "from": _inputs(folder, job, program, stage),
        "made": {name: _sha256(program_folder / name) for name in stage["writes"]},
        "compiler": version,
    }
    partial = folder / ("partial." + STATE)
    partial.write_text(json.dumps(state, indent=1), encoding="utf-8")
    os.replace(str(partial), str(folder / STATE))


def _state(folder: Path) -> Any:
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        for stages in state.values():
            for recorded in stages.values():
                recorded["made"], recorded["from"]
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, LookupError):
        return {}  # missing or damaged: every stage is run again
    return state


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(str(path), "rb") as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:LONGEST_MESSAGE] if lines else "the error has no message"


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[Any]:
    """Redirect standard output and standard error of this process and its children to a file."""
    with contextlib.ExitStack() as after:
        file = after.enter_context(open(str(path), "wb", buffering=0))
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            before = os.dup(number)
            after.callback(os.close, before)
            after.callback(os.dup2, before, number)
            after.callback(stream.flush)
            os.dup2(file.fileno(), number)
        yield file


# Programs on request


def serve(script: Path, settings: JsonObject) -> None:
    """Load programs, and run them on the arrays of each request until standard input closes.

    Args:
        script: the vendor's stage script. It defines `load`.
        settings: as for `check`, with `programs`: name of a program -> paths of its files.

    Raises:
        StopError: the SDK is missing or does not support this, or a program cannot be loaded.
    """
    send = _messages()
    vendor = _load_vendor(script, settings, send)
    import numpy as np

    programs = {}
    for name, files in settings["programs"].items():
        try:
            programs[name] = vendor.load([Path(file) for file in files])
        except Exception as error:
            send("failed", program=name, message=_described(error))
            raise StopError from error
    send("ready")
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        content = sys.stdin.buffer.read(request["bytes"])
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                outputs = programs[request["program"]](dict(arrays))
            answer = io.BytesIO()
            np.savez(answer, **{str(index): array for index, array in enumerate(outputs)})
        except Exception as error:  # the exceptions of an SDK have no common base class
            traceback.print_exc()
            send("failed", program=request["program"], message=_described(error))
        else:
            send("outputs", answer.getvalue())


def _messages() -> Callable[..., None]:
    """Return a function that sends an event with bytes to the present standard output.

    From then on, everything else that is printed goes to standard error, including the output of C++ code.
    """
    output = os.fdopen(os.dup(1), "wb")
    sys.stdout.flush()
    os.dup2(2, 1)

    def send(event: str, content: bytes = b"", **facts: Any) -> None:
        header = {"event": event, "bytes": len(content), **facts}
        output.write(json.dumps(header).encode("ascii") + b"\n")
        output.write(content)
        output.flush()

    return send


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


# Command line


def _main(arguments: list[str]) -> int:
    if arguments[:1] == ["--probe"]:
        report = _json_lines()
        try:
            _load_vendor(Path(arguments[1]), json.loads(arguments[2]), report)
        except StopError:
            return 1
        return 0
    if arguments[:1] == ["--serve"]:
        try:
            serve(Path(arguments[1]), json.loads(arguments[2]))
        except StopError:
            return 1
        return 0
    with_json = arguments[:1] == ["--json"]
    report = _json_lines() if with_json else _text_lines
    if with_json:
        # A process that was started in the background ignores SIGINT by default.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=_stop_when_input_ends, daemon=True).start()
    try:
        run(Path(__file__).resolve().parent, report)
    except StopError:
        return 1
    except KeyboardInterrupt:
        return 130
    report("done")
    return 0


def _json_lines() -> Report:
    """Return a function that prints events as JSON lines to the present standard output.

    From then on, everything else that is printed goes to standard error.
    """
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout.flush()
    os.dup2(2, 1)

    def report(event: str, **facts: Any) -> None:
        output.write(json.dumps({"event": event, **facts}) + "\n")
        output.flush()

    return report


def _text_lines(event: str, **facts: Any) -> None:
    """Print an event as a line of text."""
    where = "{program}: {stage}".format(**facts) if "stage" in facts else ""
    lines = {
        "found": "compiler version: {}".format(facts.get("version") or "unknown"),
        "kept": where + " is already finished",
        "stage": where,
        "failed": "{} failed: {}; see {}.log in the program's folder".format(
            where, facts.get("message"), facts.get("stage")
        ),
        "missing": "the vendor's SDK is not installed: {}".format(facts.get("message")),
        "unsuitable": "the vendor's SDK does not support this job: {}".format(facts.get("message")),
        "damaged": str(facts.get("message")),
        "done": "done: copy this folder back to the machine of the bundle; run `whisperport compile` again",
    }
    print(lines[event], flush=True)


def _stop_when_input_ends() -> None:
    """Stop this process when standard input closes, which happens when its parent process ends."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(GRACE_S)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
