"""The embedded model on the NPU keeps its accuracy and its words.

`make test-all` compiles it and decodes complete clips with every program in the vendor's simulator.
`make test` reads what `make evidence` recorded.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from whisperport.build.compile.compile import CompileOptions, compile
from whisperport.targets import RunOptions, get_target
from whisperport.verification.bundle_check import verify
from whisperport.verification.project_evidence import project_evidence

from ....docs.pages import ROOT
from ....extent import EVERYTHING

CHIP = "sm8650"
ONE = RunOptions(threads=1)
# Lowest SQNR of `encoder` and `step` in dB. Measured with onnxruntime-qnn 2.7.0:
# in fp16 against float32, 53.3 and 55.1; in w8a16, 34.5 and 33.5.
LOWEST_DB = {"fp16": 50.0, "w8a16": 33.0}
CLIPS = {"fp16": ("02-espeak-british.flac",), "w8a16": ()}  # (): all of the reference


def test_the_recorded_simulation_is_accurate_and_has_equal_tokens() -> None:
    (simulated,) = (one for one in project_evidence(CHIP) if one.kind == "simulated")
    file = ROOT / "benchmarks" / "results" / "chips.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["npu"]["rows"]
    (row,) = (r for r in rows if (r["target"], r["precision"]) == (CHIP, "fp16"))

    counted = {check.level: check.value for check in simulated.checks}
    checks = [check for program in row["programs"] for check in program["checks"]]

    assert {"arrays", "tokens"} <= set(counted)
    assert all(value["passed"] == value["compared"] > 0 for value in counted.values())
    for name in ("encoder", "step"):
        of_program = [c for c in checks if c["program"] == name]
        found = [c["value"] for c in of_program if c["what"].endswith(", simulated")]
        assert min(value["sqnr_db"] for value in found) >= LOWEST_DB["fp16"], name
    free = [check["value"] for check in checks if check["what"].endswith(", free")]
    assert free
    for value in free:
        assert value["n_same"] == value["n_expected"] == value["n_actual"] > 5


@pytest.mark.slow
@pytest.mark.skipif(not EVERYTHING, reason="make test-all: minutes of simulation")
@pytest.mark.skipif(
    get_target(CHIP).run_mode(ONE) != "simulator"
    or get_target(CHIP).compiler.installed({}) is None,
    reason="the simulator needs onnxruntime-qnn on x86-64",
)
@pytest.mark.parametrize("precision", LOWEST_DB)
def test_complete_clips_are_decoded_in_the_simulator(
    precision: str, exported: Any, tmp_path: Path
) -> None:
    exported_bundle = exported(CHIP, "default", precision=precision)
    folder = shutil.copytree(exported_bundle.folder, tmp_path / "bundle")
    off = CompileOptions(options={f"{CHIP}.emulate": "0"}, threads=1)
    bundle = compile(folder, off).bundle
    assert {entry.target for entry in bundle.manifest.programs} == {CHIP}
    assert all(set(entry.facts.plan) == {"HTP"} for entry in bundle.manifest.programs)

    report = verify(bundle, run=ONE, clips=CLIPS[precision])

    assert report, report.failures()
    for program in ("encoder", "step"):
        arrays = [one for one in report.checks if (one.level, one.program) == ("arrays", program)]
        assert min(one.value["sqnr_db"] for one in arrays) >= LOWEST_DB[precision], program
    (words,) = (one for one in report.checks if one.level == "words")
    assert words.value["wer"] == words.value["reference_wer"] == 0
    free = [one for one in report.checks if one.what.endswith(", free")]
    assert len(free) == words.value["clips"] == (len(CLIPS[precision]) or 6)
    if precision == "fp16":
        assert all(one.value["n_same"] == one.value["n_expected"] for one in free)
