"""Compile outlier checkpoints and the embedded model in float16 for two chips, and simulate them.

    python simulate_outliers.py --out results/outliers.json --work work/simulated ../tests/outliers/*.xz

For every checkpoint and chip, the functions of `whisperport export` and `whisperport compile` are called
with their default limits. Written are the verdict, the limits, and the SQNR of every output in the vendor's
simulator, as `simulated` beside what `measure_outliers.py` wrote. A bundle in the work folder that was
simulated before is not made again. The interpreter of a compiler that is not installed here is named in
WHISPERPORT_TOOLCHAIN_ROCKCHIP.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whisperport.build.compile.compile import compile
from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.errors import BundleError, VerificationError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.program.bundle import Bundle
from whisperport.program.checks import Check
from whisperport.system.progress import reporting
from whisperport.verification.machine import machine, versions
from whisperport.verification.reference import Reference

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from outlier_checkpoints import digest, write_checkpoint

CHIPS = ("sm8650", "rk3588")
PACKAGES = ("whisperport", "torch", "onnx", "onnxruntime", "onnxruntime-qnn")


def simulated(bundle: Bundle) -> dict[str, list[Check]]:
    """Return program -> what was compared in the simulator; only programs that were simulated."""
    found = {
        entry.spec.name: [
            check
            for evidence in bundle.manifest.evidence(entry.spec.name)
            if evidence.kind == "simulated"
            for check in evidence.checks
        ]
        for entry in bundle.manifest.programs
    }
    return {name: checks for name, checks in found.items() if checks}


def compiled(source: Path | str, chip: str, folder: Path) -> Bundle:
    """Return the compiled bundle: the one in `folder`, or a new one.

    Raises:
        VerificationError: the export or the compilation was refused.
    """
    try:
        if simulated(known := Bundle.open(folder)):
            return known
    except BundleError:
        pass  # there is none
    precision = ExportOptions(precision="fp16")
    with reporting(print):
        bundle = export(load_checkpoint(source), chip, folder, precision)
        return compile(bundle.folder).bundle


def row(source: Path | str, chip: str, folder: Path) -> dict[str, Any]:
    """Return what one chip's simulator gave for one checkpoint."""
    try:
        bundle = compiled(source, chip, folder)
    except VerificationError as error:
        return {"verdict": "refused", "why": error.why}
    reference = Reference.from_arrays(bundle.reference())
    own = {output: reference.loss("fp16", output) for output in ("features", "logits")}
    return {
        "verdict": "verified",
        "torch_float16_db": {k: round(loss.sqnr_db, 1) for k, loss in own.items() if loss},
        "programs": {name: dict(_numbers(checks)) for name, checks in simulated(bundle).items()},
    }


def _numbers(checks: list[Check]) -> Iterator[tuple[str, Any]]:
    """Return the limit of a program's arrays, and the SQNR of each output; of an encoder, of each clip."""
    arrays = [check for check in checks if check.level == "arrays"]
    yield "limit", " / ".join(sorted({check.rule for check in arrays}))
    for check in arrays:
        numbers = {
            "sqnr_db": round(check.value["sqnr_db"], 1),
            "speech_sqnr_db": round(check.value.get("speech_sqnr_db", math.nan), 1),
            "largest_error": round(check.value["max_relative"], 4),
        }
        is_clip = "speech_sqnr_db" in check.value
        yield check.what.removesuffix(", simulated"), numbers if is_clip else numbers["sqnr_db"]
    if tokens := [check for check in checks if check.level == "tokens"]:
        yield "clips_with_equal_tokens", f"{sum(c.passed for c in tokens)} of {len(tokens)}"
    for check in checks:
        if check.level == "words":
            yield "words_that_differ", f"{check.value['differ']:g} of {check.value['words']:g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="*", help="stored differences")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of checkpoints and bundles"
    )
    args = parser.parse_args()
    sources: dict[str, Path | str] = {}
    for file in args.files:
        sources[file.stem] = folder = args.work / f"outlier-{file.stem}"
        if not folder.exists():
            write_checkpoint(file, folder)
    sources["default"] = "default"  # the control
    measured = json.loads(args.out.read_text()) if args.out.exists() else {}
    results: dict[str, Any] = {"machine": machine(), "versions": versions(PACKAGES)}
    measured["simulated"] = results
    for name, source in sources.items():
        results[name] = {"sha256": digest(load_checkpoint(source).weights)}
        for chip in CHIPS:
            results[name][chip] = row(source, chip, args.work / f"{name}-{chip}")
            args.out.write_text(json.dumps(measured, indent=1, ensure_ascii=False) + "\n")
            print(name, chip, results[name][chip]["verdict"], flush=True)


if __name__ == "__main__":
    main()
