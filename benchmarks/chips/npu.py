"""What the NPU compilers that are installed here make of the embedded model, chip by chip.

    python -m benchmarks.chips.npu [--target NAME ...] [--program NAME ...] [--clips N] [--work FOLDER]

For every target with a vendor's compiler on this machine, and every precision of it, the embedded model is
exported and compiled, and run in the vendor's simulator where there is one. A precision that whisperport
refuses is listed with the numbers of the refusal. With `--program`, only these programs are compiled, and
the others are placed on the chip's fallback target. Toolchains in interpreters of their own are found as by
`whisperport compile`, through WHISPERPORT_TOOLCHAIN_NAME.

With `--work`, finished stages are kept in that folder: after an interruption, the same command continues.
A row of which a stage was already finished has no seconds.

Writes `results/chips.json` after every chip; chips that are not run again keep their rows.
`python docs/measured_pages.py` makes docs/reference/npu-compilers.md from it.
Seconds are those of the compiler and the simulator on this machine, never of a chip.
"""

import argparse
import datetime
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from whisperport.apps.cli.console import stages
from whisperport.build.compile.compile import Compiled, CompileOptions, compile
from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.errors import WhisperportError
from whisperport.model.checkpoint import Checkpoint, load_checkpoint
from whisperport.program.bundle import Bundle
from whisperport.program.checks import Check
from whisperport.system.progress import Progress, reporting
from whisperport.targets import TARGETS, Target
from whisperport.targets.target_options import describe
from whisperport.verification import machine

from ..record import record, recorded


def main() -> None:
    """Measure, and write the results of each chip as soon as they are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--target", action="append", help="a chip; default: all")
    parser.add_argument("--precision", action="append", help="a precision; default: all of a chip")
    parser.add_argument("--program", action="append", help="a program; default: all")
    parser.add_argument("--clips", type=int, default=2, help="clips to simulate; default: 2")
    parser.add_argument(
        "--work", type=Path, help="folder that keeps finished stages; default: none"
    )
    chosen = parser.parse_args()
    checkpoint = load_checkpoint("default")
    rows = recorded("chips", "npu").get("rows", [])
    with stages() as progress:
        for target, precision in _asked(chosen.target, chosen.precision):
            how = _export_options(target, precision, chosen.program or [])
            kept = chosen.work and chosen.work / f"{target.spec.name}-{precision}"
            row = _measured(checkpoint, target, precision, how, chosen.clips, kept, progress)
            rows = [one for one in rows if _key(one) != _key(row)] + [row]
            record("chips", "npu", {"rows": rows})


def _key(row: dict[str, Any]) -> tuple[str, str]:
    return row["target"], row["precision"]


def _asked(targets: list[str] | None, precisions: list[str] | None) -> Iterator[tuple[Target, str]]:
    for target in TARGETS:
        if targets and target.spec.name not in targets:
            continue
        if target.compiler is None or target.compiler.installed({}) is None:
            continue
        for precision in target.spec.runs.precisions:
            if precisions is None or precision in precisions:
                yield target, precision


def _export_options(target: Target, precision: str, programs: list[str]) -> ExportOptions:
    """Return the options that place all programs, or only those that are named, on the chip."""
    if not programs:
        return ExportOptions(precision=precision)
    return ExportOptions(
        placement=dict.fromkeys(programs, target.spec.name),
        precisions=dict.fromkeys(programs, precision),
    )


def _measured(
    checkpoint: Checkpoint,
    target: Target,
    precision: str,
    how: ExportOptions,
    clips: int,
    work: Path | None,
    progress: Progress,
) -> dict[str, Any]:
    """Return the row of a chip in a precision: what was compiled and simulated, or why it was refused."""
    name = target.spec.name
    row: dict[str, Any] = {
        "target": name,
        "precision": precision,
        "machine": machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "refused": "",
        "programs": [],
    }
    reason = target.unsupported("encoder", precision)
    if reason:
        return {**row, "refused": reason.why}
    assert target.compiler is not None
    known = {option.name for option in describe(target.compiler.options)}
    options = {f"{name}.emulate": str(clips)} if "emulate" in known else {}
    said: list[str] = []

    def listen(stage: str) -> None:
        said.append(stage)
        progress(stage)

    with TemporaryDirectory() as folder:
        started = time.monotonic()
        try:
            # With programs of its own placement, the rest runs where the chip's decoder falls back to.
            main = (
                target.spec.runs.fallback if how.placement and target.spec.runs.fallback else name
            )
            with reporting(progress):
                bundle = export(checkpoint, main, Path(folder) / name, how)
            row["export_s"] = round(time.monotonic() - started, 1)
            started = time.monotonic()
            # The few shipped recordings are enough to compare precisions.
            asked = CompileOptions(force=True, options=options, work=work)
            with reporting(listen):
                compiled = compile(bundle.folder, asked)
        except WhisperportError as error:
            return {**row, "refused": error.why or str(error)}
        if not any("already finished" in stage for stage in said):
            row["compile_s"] = round(time.monotonic() - started, 1)
        return {**row, "programs": _programs(compiled)}


def _programs(compiled: Compiled) -> list[dict[str, Any]]:
    return [
        {
            "name": one.name,
            "target": one.target,
            "bytes": one.bytes,
            "compiler": one.compiler,
            "samples": one.samples,
            "kinds": _kinds(compiled.bundle, one.name),
            "checks": cited(one.emulation),
            "notes": list(one.notes),
        }
        for one in compiled.programs
    ]


def cited(checks: Iterable[Check]) -> list[dict[str, Any]]:
    """Return the checks that a page cites: of arrays, the one with the lowest SQNR of each kind of run."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for check in checks:
        row = {"level": check.level, "program": check.program, "what": check.what}
        row |= {"passed": check.passed, "value": dict(check.value)}
        key = (check.level, check.program, check.what)
        if check.level == "arrays":
            decibels = check.value.get("sqnr_db", math.inf)
            row["value"] = {"sqnr_db": decibels}
            key = (check.level, check.program, check.what.rpartition(", ")[2])
            if key in rows and rows[key]["value"]["sqnr_db"] <= decibels:
                continue
        rows[key] = row
    return list(rows.values())


def _kinds(bundle: Bundle, program: str) -> list[str]:
    return sorted({evidence.kind for evidence in bundle.manifest.evidence(program)})


if __name__ == "__main__":
    main()
