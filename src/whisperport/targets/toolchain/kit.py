"""What the stages of several compilers share: samples, output files, log lines, versions.

The driver gives this module to every stage; a copy of it is the `kit.py` of a work folder. It needs only
the standard library of Python 3.9 or later, and numpy where arrays are read; it does not import
whisperport.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MAX_LOG = 4 * 2**20  # bytes of a log that are examined


class Job(NamedTuple):
    """One program that a stage works on.

    Attributes:
        folder: the program's folder, which holds all files.
        name: name of the program.
        settings: JSON of this program.
        target: JSON of the target, the same for all programs.
    """

    folder: Path
    name: str
    settings: Mapping[str, Any]
    target: Mapping[str, Any]


class NotWrittenError(Exception):
    """The compiler reported success and wrote no file."""


class SimulationError(Exception):
    """A simulator reported an error, or returned other outputs than the program has."""


def version_fault(version: str, required: Mapping[str, Any]) -> str:
    """Return why a version of an SDK does not support a chip; "" if it does, or if it is not known.

    Args:
        version: the installed version, such as "2.5.0".
        required: `chip`, its name; `sdk`, the SDK's name, or ""; `oldest`, the major and minor number of
            the oldest version that is known to compile for the chip; `same_major`, whether a version with
            another major number does not.
    """
    oldest = list(required["oldest"])
    numbers = [int(number) for number in re.findall("[0-9]+", version)[:2]]
    same_major = bool(required.get("same_major"))
    if not numbers or (numbers >= oldest and not (same_major and numbers[0] != oldest[0])):
        return ""
    later = f"a later {oldest[0]}.x" if same_major else "later"
    sdk = required["sdk"] or "version"
    return (
        f"{required['chip']} needs {sdk} {oldest[0]}.{oldest[1]} or {later}; "
        f"version {version} is installed"
    )


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """Give the path of a partial file beside `path`; afterwards it replaces `path`.

    Raises:
        NotWrittenError: the partial file is missing or empty.
    """
    partial = path.with_name("partial." + path.name)
    if partial.exists():
        partial.unlink()
    try:
        yield partial
    except BaseException:
        if partial.exists():
            partial.unlink()
        raise
    if not partial.is_file() or partial.stat().st_size == 0:
        raise NotWrittenError("it wrote no " + path.name)
    os.replace(str(partial), str(path))


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file, completely or not at all."""
    with written(path) as partial:
        partial.write_text(json.dumps(data, indent=1), encoding="utf-8")


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Make a folder the current one, for compilers that write files of their own into it."""
    before = os.getcwd()
    os.chdir(str(folder))
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long something took, for the log."""
    started = time.monotonic()
    yield
    print(f"seconds of the {what}:", round(time.monotonic() - started, 1), flush=True)


def read_log(path: Path) -> str:
    """Return the first part of a log without colours; "" if it cannot be read."""
    try:
        with open(str(path), "rb") as file:
            text = file.read(MAX_LOG).decode("utf-8", "replace")
    except OSError:
        return ""
    return re.sub("\x1b\\[[0-9;]*m", "", text)


def load(path: Path) -> Any:
    """Memory-map an array."""
    import numpy as np

    return np.load(path, mmap_mode="r", allow_pickle=False)


def run_samples(
    folder: Path,
    inputs: Mapping[str, str],
    outputs: Sequence[str],
    run: Callable[[Mapping[str, Any]], Sequence[Any] | None],
) -> None:
    """Run a program once per sample, and write its outputs as float32 arrays of all samples.

    Args:
        folder: the program's folder.
        inputs: name of an input -> file of its samples, (samples, ...).
        outputs: file of each output, in the order of the program.
        run: runs the program: name of an input -> array, to the outputs; None: it failed.

    Raises:
        SimulationError: the program has another number of outputs.
    """
    import numpy as np

    arrays = {name: load(folder / file) for name, file in inputs.items()}
    count = len(next(iter(arrays.values())))
    results: list[list[Any]] = [[] for _ in outputs]
    with timed("simulation, which tell nothing about the device"):
        for sample in range(count):
            print("sample", sample + 1, "of", count, flush=True)
            feed = {name: np.ascontiguousarray(array[sample]) for name, array in arrays.items()}
            returned = run(feed)
            if returned is None or len(returned) != len(outputs):
                number = "no" if returned is None else len(returned)
                raise SimulationError(f"it returned {number} outputs; expected {len(outputs)}")
            for values, output in zip(results, returned):  # noqa: B905  # Python 3.9 has no `strict`
                values.append(np.asarray(output, np.float32))
    for file, values in zip(outputs, results):  # noqa: B905
        np.save(folder / file, np.stack(values), allow_pickle=False)
