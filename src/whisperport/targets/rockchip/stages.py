"""The stage of the compiler: compile, with a run in its simulator. Run by `toolchain/driver.py`.

This script needs the package rknn-toolkit2 and does not import whisperport: a copy of it is the `stages.py`
of a work folder.

    step.onnx, calibration arrays, simulated inputs ─compile─► step.rknn, built.json, simulated outputs

The simulator runs only a program that the same process has built, and cannot load a compiled file: that is
why compiling and simulating are one stage.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_LOG = 4 * 2**20  # bytes of a log that are examined


class RejectedError(Exception):
    """The compiler returned an error code."""


class SimulationError(Exception):
    """The simulator returned an error code, or other outputs than the program has."""


class NotWrittenError(Exception):
    """The compiler reported success and wrote no file."""


def version() -> str:
    """Return the version of rknn-toolkit2.

    Raises:
        ImportError: it is not installed, or a package that it needs is missing.
    """
    from importlib import metadata

    import rknn.api  # noqa: F401

    return metadata.version("rknn-toolkit2")


def check(version: str, settings: Mapping[str, Any]) -> str:
    """Return why this version of the SDK does not support the chip; "" if it does.

    Args:
        settings: `chip`, its name; `oldest`, the major and minor number of the oldest version that is
            known to compile for it.
    """
    oldest = list(settings["oldest"])
    found = [int(number) for number in re.findall("[0-9]+", version)[:2]]
    if found and found < oldest:
        return (
            f"{settings['chip']} needs rknn-toolkit2 {oldest[0]}.{oldest[1]} or later; "
            f"version {version} is installed"
        )
    return ""


def _compile(folder: Path, program: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Build a program, export it, and run it in the simulator."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars fill the log
    own = program["settings"]
    log = folder / "compile.log"
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder) as work, _inside(Path(work)):
        from rknn.api import RKNN

        compiler = RKNN(verbose=False)
        started = time.monotonic()
        _build(compiler, folder, Path(work), own, settings, log)
        partial = Path(work, own["artifact"])
        _expect_success("export_rknn", compiler.export_rknn(str(partial)), log)
        if not partial.is_file() or partial.stat().st_size == 0:
            raise NotWrittenError("it wrote no " + own["artifact"])
        built = {
            "seconds": round(time.monotonic() - started, 1),
            "version": version(),
            "errors": _errors(log),
            "disabled_rules": own["disable_rules"],
        }
        if own["simulated_outputs"]:
            _simulate(compiler, folder, own)
        compiler.release()
        (folder / "built.json").write_text(json.dumps(built, indent=1), encoding="utf-8")
        os.replace(str(partial), str(folder / own["artifact"]))


def _build(
    compiler: Any,
    folder: Path,
    work: Path,
    own: Mapping[str, Any],
    settings: Mapping[str, Any],
    log: Path,
) -> None:
    """Configure the compiler, load the program, and build it, quantized if there is a calibration set."""
    quantized = {"quantized_dtype": own["quantized_dtype"]} if own["calibration"] else {}
    configured = compiler.config(
        target_platform=settings["chip"],
        optimization_level=own["optimization"],
        disable_rules=own["disable_rules"],
        **quantized,
    )
    print("graph rules that are turned off:", ", ".join(own["disable_rules"]) or "none", flush=True)
    _expect_success("config", configured, log)
    _expect_success("load_onnx", compiler.load_onnx(model=str(folder / own["model"])), log)
    dataset = _dataset(folder, work, own["calibration"]) if own["calibration"] else None
    built = compiler.build(do_quantization=dataset is not None, dataset=dataset)
    _expect_success("build", built, log)


def _dataset(folder: Path, work: Path, files: Sequence[str]) -> str:
    """Write every sample to files of its own. Returns the list of them: one line per sample."""
    import numpy as np

    arrays = [np.load(folder / file, mmap_mode="r", allow_pickle=False) for file in files]
    lines = []
    for sample in range(min(map(len, arrays))):
        paths = [work / f"sample-{sample}-{index}.npy" for index in range(len(arrays))]
        for path, array in zip(paths, arrays):  # noqa: B905  # Python 3.9 has no `strict`
            np.save(path, array[sample], allow_pickle=False)
        lines.append(" ".join(map(str, paths)))
    listed = work / "samples.txt"
    listed.write_text("\n".join(lines), encoding="utf-8")
    return str(listed)


def _simulate(compiler: Any, folder: Path, own: Mapping[str, Any]) -> None:
    """Run the program that was built in the simulator, once per sample, and write its outputs."""
    import numpy as np

    if compiler.init_runtime() != 0:  # no `target`: the simulator
        raise SimulationError("init_runtime failed")
    arrays = [
        np.load(folder / file, mmap_mode="r", allow_pickle=False)
        for file in own["simulated_inputs"]
    ]
    files = own["simulated_outputs"]
    results: list[list[Any]] = [[] for _ in files]
    started = time.monotonic()
    for sample in range(len(arrays[0])):
        given = [np.ascontiguousarray(array[sample]) for array in arrays]
        outputs = compiler.inference(inputs=given, data_format=["nchw"] * len(given))
        if outputs is None or len(outputs) != len(files):
            found = "none" if outputs is None else len(outputs)
            raise SimulationError(f"it returned {found} outputs; expected {len(files)}")
        for made, output in zip(results, outputs):  # noqa: B905
            made.append(np.asarray(output, np.float32))
    print("seconds of the simulation, which tell nothing about the chip:", end=" ")
    print(round(time.monotonic() - started, 1), flush=True)
    for file, made in zip(files, results):  # noqa: B905
        np.save(folder / file, np.stack(made), allow_pickle=False)


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Make a folder the current one: the compiler writes files of its own into it."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _expect_success(call: str, code: Any, log: Path) -> None:
    """Raise an error with the compiler's own message if a call failed.

    Raises:
        RejectedError: the code is not 0.
    """
    if code != 0:
        errors = _errors(log)
        reason = errors[-1] if errors else "see the log"
        raise RejectedError(f"{call} returned {code}: {reason}")


def _errors(log: Path) -> list[str]:
    """Return the lines of a log that the compiler marks as errors: "E build: …", perhaps in colours."""
    try:
        with open(str(log), "rb") as file:
            text = file.read(MAX_LOG).decode("utf-8", "replace")
    except OSError:
        return []
    plain = re.sub("\x1b\\[[0-9;]*m", "", text)
    lines = re.findall(r"^E ([^\n]+)$", plain, re.MULTILINE)
    return [re.sub(r"\[[0-9:.]+\] ", "", line).strip()[:200] for line in lines]


STAGES: Mapping[str, Callable[[Path, Mapping[str, Any], Mapping[str, Any]], None]] = {
    "compile": _compile,
}
