"""Compile programs for Hailo in stages, each kept once it is done.

Needs the vendor's compiler (`hailo_sdk_client`) and nothing of whisperport: a copy of this file is the
`compile.py` that `whisperport compile` leaves for a machine that has the compiler.

    work folder/
    ├── job.json            the chip, the oldest compiler that serves it, the programs
    ├── state.json          of every finished stage, what it was made from and what it made
    ├── compile.py
    └── encoder/            one folder a program
        ├── encoder.onnx, encoder.alls, calibration files
        └── parsed.har, optimized.har, compiled.har, encoder.hef
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

JOB, STATE = "job.json", "state.json"
STAGES = ("parse", "optimize", "compile")
CHUNK = 1 << 20


class WrongCompilerError(Exception):
    """The compiler that is installed does not serve the chip."""


def run(folder: Path, say: Callable[[str], Any] = print) -> None:
    """Do what is left of a work folder's job.

    Raises:
        ImportError: something is left, and the compiler is not installed.
        WrongCompilerError: it is of another major version than the chip needs, or too old.
        Exception: whatever the compiler raises.
    """
    job = json.loads((folder / JOB).read_text(encoding="utf-8"))
    for program in job["programs"]:
        for stage in STAGES:
            if is_done(folder, job, program, stage):
                say(f"{program['name']}: {stage} was done before, and is kept")
                continue
            say(f"{program['name']}: {stage}")
            sdk = _sdk(job)
            _DO[stage](sdk, job["chip"], program, folder / program["name"])
            _note(folder, job, program, stage)


def is_done(folder: Path, job: Mapping[str, Any], program: Mapping[str, Any], stage: str) -> bool:
    """Whether a stage was finished from just these inputs, and what it made is still whole."""
    noted = _state(folder).get(program["name"], {}).get(stage)
    made = _output(folder, program, stage)
    if not noted or not made.is_file() or noted["made"] != _sha256(made):
        return False
    before = [made for made in _made_from(folder, program, stage) if not made.is_file()]
    return not before and bool(noted["from"] == _inputs(folder, job, program, stage))


def installed_version() -> str | None:
    """The compiler's version, "" where it does not say; None: it is not installed."""
    try:
        import hailo_sdk_client
    except ImportError:
        return None
    return str(getattr(hailo_sdk_client, "__version__", ""))


def check_version(chip: str, oldest: Sequence[int]) -> None:
    """Raises WrongCompilerError if one is installed that serves other chips, or is too old.

    Args:
        oldest: the first two numbers of a version; the first must be the same.
    """
    version = installed_version() or ""
    found = [int(number) for number in re.findall("[0-9]+", version)[:2]]
    if found and not (found[0] == oldest[0] and found >= list(oldest)):
        raise WrongCompilerError(
            f"{chip} needs version {oldest[0]}.{oldest[1]} or a later {oldest[0]}.x; "
            f"version {version} is installed"
        )


def _sdk(job: Mapping[str, Any]) -> Any:
    import hailo_sdk_client

    check_version(job["chip"], job["compiler"])
    return hailo_sdk_client


# The stages. What they call, and how, is held against recorded signatures in the tests.


def _parse(sdk: Any, chip: str, program: Mapping[str, Any], folder: Path) -> None:
    runner = sdk.ClientRunner(hw_arch=chip)
    runner.translate_onnx_model(str(folder / f"{program['name']}.onnx"), program["name"])
    _save_har(runner, folder / "parsed.har")


def _optimize(sdk: Any, chip: str, program: Mapping[str, Any], folder: Path) -> None:
    runner = sdk.ClientRunner(har=str(folder / "parsed.har"))
    runner.load_model_script(str(folder / f"{program['name']}.alls"))
    runner.optimize(_calibration(program["calibration"], folder), work_dir=str(folder))
    _save_har(runner, folder / "optimized.har")


def _compile(sdk: Any, chip: str, program: Mapping[str, Any], folder: Path) -> None:
    runner = sdk.ClientRunner(har=str(folder / "optimized.har"))
    hef = runner.compile()
    _save_har(runner, folder / "compiled.har")
    _write(folder / f"{program['name']}.hef", hef)


_DO = {"parse": _parse, "optimize": _optimize, "compile": _compile}


def _calibration(files: Any, folder: Path) -> Any:
    """One array, or one for each input layer by its name; mapped from disk, not read."""
    import numpy as np

    if isinstance(files, str):
        return np.load(folder / files, mmap_mode="r", allow_pickle=False)
    return {layer: _calibration(file, folder) for layer, file in files.items()}


def _save_har(runner: Any, path: Path) -> None:
    partial = path.with_name(f"partial.{path.name}")
    runner.save_har(str(partial))
    os.replace(partial, path)


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f"partial.{path.name}")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


# What was done.


def _output(folder: Path, program: Mapping[str, Any], stage: str) -> Path:
    name = str(program["name"])
    made = {"parse": "parsed.har", "optimize": "optimized.har", "compile": f"{name}.hef"}
    return folder / name / made[stage]


def _made_from(folder: Path, program: Mapping[str, Any], stage: str) -> list[Path]:
    inside, name, files = folder / program["name"], program["name"], program["calibration"]
    if stage == "parse":
        return [inside / f"{name}.onnx"]
    if stage == "compile":
        return [inside / "optimized.har"]
    arrays = [files] if isinstance(files, str) else list(files.values())
    return [inside / "parsed.har", inside / f"{name}.alls", *(inside / file for file in arrays)]


def _inputs(
    folder: Path, job: Mapping[str, Any], program: Mapping[str, Any], stage: str
) -> dict[str, str]:
    hashes = {path.name: _sha256(path) for path in _made_from(folder, program, stage)}
    return {"chip": job["chip"], **hashes}


def _note(folder: Path, job: Mapping[str, Any], program: Mapping[str, Any], stage: str) -> None:
    state = _state(folder)
    state.setdefault(program["name"], {})[stage] = {
        "from": _inputs(folder, job, program, stage),
        "made": _sha256(_output(folder, program, stage)),
        "compiler": installed_version(),
    }
    _write(folder / STATE, json.dumps(state, indent=1).encode("utf-8"))


def _state(folder: Path) -> Any:
    try:
        return json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or cut short: every stage is done again
        return {}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


if __name__ == "__main__":
    run(Path(__file__).resolve().parent)
    print("done: take this folder back to the bundle, and run `whisperport compile` again")
