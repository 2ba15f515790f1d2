"""Bundles with programs on the NPU: compiled by the vendor's compiler, run in the vendor's simulator.

Nothing is faked: the package onnxruntime-qnn has both. The model is a random one of a few kilobytes.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.build.compile.compile import CompileOptions, compile
from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.build.inspect import InspectOptions, inspect
from whisperport.errors import BundleError, LoweringError, MissingPackageError
from whisperport.program.bundle import Bundle
from whisperport.system.progress import reporting
from whisperport.targets import RunOptions, get_target
from whisperport.verification import GATES, compare
from whisperport.verification.bundle_check import verify
from whisperport.verification.clips import Clip
from whisperport.verification.evidence import with_evidence
from whisperport.verification.project_evidence import project_evidence
from whisperport.verification.report import Report

from ....docs.pages import ROOT
from ....extent import EVERYTHING

# Bundles with programs on the NPU: compiled by the vendor's compiler, run in the vendor's simulator.
#
# Nothing is faked: the package onnxruntime-qnn has both. The model is a random one of a few kilobytes.


# All programs are on the NPU. Calibrating one more of them takes many seconds.
PRECISIONS = {
    "encoder": "fp16",
    "cross_kv": "w8a16",
    "prefill_4": "fp16",
    "prefill_64": "fp16",
    "step": "w8a16",
    "align": "fp16",
}
CHIP = "sm8650"
ONE = RunOptions(threads=1)
EMULATED = RunOptions(threads=1, options={f"{CHIP}.emulate": "on"})

needs_simulator = pytest.mark.skipif(
    get_target(CHIP).run_mode(ONE) != "simulator"
    or get_target(CHIP).compiler.installed({}) is None,
    reason="the simulator needs onnxruntime-qnn on x86-64",
)


def _noise(seed: int) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(3200)).astype(np.float32)


# For the calibration: 66 windows of 8 mel bins and 20 frames.
SPECTROGRAMS = np.random.default_rng(2).uniform(-1, 1, (66, 1, 8, 20)).astype(np.float32)
CLIPS = (Clip("hiss", "so", _noise(0)), Clip("more", "", _noise(1)))


@pytest.fixture(scope="module")
def export_once(
    micro_checkpoint: Any, micro_programs: tuple[Any, ...], tmp_path_factory: Any
) -> Path:
    """Export the micro model with all programs on the NPU, some of them quantized."""
    from whisperport.model.trace import variants

    work = tmp_path_factory.mktemp("qualcomm")
    np.save(work / "calibration.npy", SPECTROGRAMS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variants, "whisper_programs", lambda *_, **__: iter(micro_programs))
        options = ExportOptions(
            clips=CLIPS,
            precisions=PRECISIONS,
            run=ONE,
            calibration=work / "calibration.npy",
            allow_unverified=True,  # random weights give words of chance; a quantized model has others
        )
        return export(micro_checkpoint, CHIP, work / "bundle", options).folder


@pytest.fixture(scope="module")
def compiled(export_once: Path) -> Bundle:
    """The exported bundle, compiled and simulated."""
    bundle = shutil.copytree(export_once, export_once.with_name("compiled"))
    # Random weights give words of chance.
    return compile(bundle, CompileOptions(threads=1, allow_unverified=True)).bundle


@pytest.fixture
def exported_bundle(export_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(export_once, tmp_path / "bundle"))


# What export leaves --------------------------------------------------------------------------------


def test_an_exported_bundle_says_that_nothing_was_compiled_or_simulated(exported_bundle):
    manifest = Bundle.open(exported_bundle).manifest

    assert {entry.spec.name for entry in manifest.programs} == set(PRECISIONS)
    for entry in manifest.programs:
        assert {one.kind for one in entry.evidence} == {"emulated"}
        assert manifest.status(entry.spec.name) == "checked against vendor documentation"
    with pytest.raises(BundleError, match=r"is not compiled for `sm8650` yet") as missing:
        get_target(CHIP).load(exported_bundle, manifest.programs, ONE)
    assert "whisperport compile BUNDLE" in missing.value.hint


def test_the_mask_is_bounded_in_both_precisions(export_once):
    manifest = Bundle.open(export_once).manifest

    for name, precision in PRECISIONS.items():
        placement = manifest.program(name).placement
        assert placement.precision == precision
        has_mask = any(tensor.name == "mask" for tensor in manifest.program(name).spec.inputs)
        assert placement.mask == (-64 if has_mask else -30000)


# The compiler and the simulator ----------------------------------------------------------------------


@needs_simulator
def test_every_program_is_compiled_simulated_and_compared(compiled):
    manifest = compiled.manifest

    for entry in manifest.programs:
        assert entry.files == (f"{CHIP}/{entry.spec.name}.qnn", f"{CHIP}/{entry.spec.name}.onnx")
        assert entry.facts.compiled_for == "sm8650, HTP v75"
        assert re.fullmatch(r"\d+\.\d+\.\d+", entry.facts.compiler)
        assert set(entry.facts.plan) == {"HTP"}  # no node runs on the CPU
        kinds = {one.kind: one for one in manifest.evidence(entry.spec.name)}
        assert {"compiled", "simulated"} <= set(kinds), entry.spec.name
        assert set(kinds["simulated"].files) == {f"{CHIP}/{entry.spec.name}.qnn"}
        arrays = [one for one in kinds["simulated"].checks if one.level == "arrays"]
        assert arrays
        for one in arrays:
            assert one.what.endswith(", simulated")
            assert one.passed, one
        assert min(one.value["sqnr_db"] for one in arrays) > GATES[entry.precision].min_sqnr_db
        if entry.spec.name != "encoder":  # whose words are of chance, too
            assert manifest.status(entry.spec.name) == "simulated here"


@needs_simulator
def test_the_loaded_programs_compute_in_float16_what_the_lowered_ones_compute(compiled):
    bundle, target = compiled, get_target(CHIP)
    entries = [one for one in bundle.manifest.programs if one.precision == "fp16"]
    simulated = target.load(bundle.folder, entries, ONE)
    emulated = target.load(bundle.folder, entries, EMULATED)
    random = np.random.default_rng(5)

    for name, runner in simulated.items():
        inputs = {
            tensor.name: random.standard_normal(tensor.shape).astype(tensor.dtype)
            for tensor in runner.spec.inputs
        }
        found, expected = runner.run(inputs), emulated[name].run(inputs)
        for output, array in expected.items():
            compared = compare(output, found[output], array, GATES["fp16"])
            assert compared, f"{name}: {output}: {compared.reason}"
        changed = [output for output, array in expected.items() if (array != found[output]).any()]
        assert changed, f"{name} was not computed in float16"


@needs_simulator
def test_a_run_in_the_simulator_is_evidence_of_a_simulation_and_not_of_a_run(compiled):
    bundle = compiled
    report = Report(subject="", checks=(), machine={}, versions={}, seconds=0)

    by_options = {
        "simulated": with_evidence(bundle.manifest, report, {}),
        "emulated": with_evidence(bundle.manifest, report, EMULATED.options),
    }

    for kind, manifest in by_options.items():
        assert manifest.program("step").evidence[-1].kind == kind


@needs_simulator
def test_inspect_says_which_nodes_the_npu_runs(compiled):
    bundle = compiled

    found = inspect(bundle.folder, InspectOptions(repeat=1))

    assert {plan.program for plan in found.plans} == set(PRECISIONS)
    assert all(set(plan.engines) == {"HTP"} for plan in found.plans)
    assert min(plan.engines["HTP"] for plan in found.plans) > 5


@needs_simulator
def test_without_simulation_the_bundle_claims_none_and_finished_stages_are_kept(
    exported_bundle, tmp_path
):
    off, seen = {f"{CHIP}.emulate": "0"}, []
    made = compile(exported_bundle, CompileOptions(options=off, threads=1)).bundle
    assert made.manifest.status("step") == "compiled here"
    state = json.loads((tmp_path / "bundle.compile" / CHIP / "state.json").read_text())
    assert all(set(finished) == {"compile"} for finished in state.values())

    with reporting(seen.append):
        compile(exported_bundle, CompileOptions(options=off, threads=1))

    assert f"{CHIP}: all stages are already finished" in seen


@needs_simulator
def test_a_chip_without_floating_point_rejects_a_program_in_float_by_the_names_of_its_nodes(
    exported_bundle, monkeypatch
):
    """`export` rejects this; here the real compiler is asked what it says about such a program."""
    from whisperport.targets.vendors.qualcomm.chips import CHIPS
    from whisperport.targets.vendors.qualcomm.compiler import QnnCompiler

    target = get_target(CHIP)
    qcm6490 = next(chip for chip in CHIPS if chip.name == "qcm6490")
    monkeypatch.setattr(target, "compiler", QnnCompiler(qcm6490))

    with pytest.raises(LoweringError, match="does not support the program") as refused:
        compile(exported_bundle, CompileOptions(options={f"{CHIP}.emulate": "0"}, threads=1))

    assert re.search(r"\d+ nodes are not supported: .*LayerNormalization", refused.value.why)
    assert "compile.log" in refused.value.hint
    assert Bundle.open(exported_bundle).manifest.status("encoder") != "compiled here"


# What is missing, or does not fit ------------------------------------------------------------------


@needs_simulator
@pytest.mark.parametrize("target", ["sm8550", "qcm6490"])
def test_a_file_for_another_chip_is_rejected_before_it_is_loaded(compiled, target):
    bundle = compiled

    with pytest.raises(BundleError, match=f"for another chip than `{target}`") as refused:
        get_target(target).load(bundle.folder, [bundle.manifest.program("step")], ONE)

    assert "compiled for chip 57 with HTP v75" in refused.value.why


@needs_simulator
def test_a_device_library_that_is_not_there_is_an_error_and_not_a_run_on_the_cpu(
    compiled, tmp_path
):
    bundle = compiled
    run = RunOptions(options={f"{CHIP}.library": str(tmp_path / "libQnnHtp.so")})

    with pytest.raises(BundleError, match="cannot load") as refused:
        get_target(CHIP).load(bundle.folder, bundle.manifest.programs[:1], run)

    assert f"{CHIP}.library" in refused.value.hint


def test_without_the_package_an_error_says_what_to_install(exported_bundle, monkeypatch):
    import sys

    manifest = Bundle.open(exported_bundle).manifest
    (entry, *_) = manifest.programs
    compiled = f"{CHIP}/encoder.qnn"
    (exported_bundle / compiled).write_bytes(b"")
    monkeypatch.setitem(sys.modules, "onnxruntime_qnn", None)

    with pytest.raises(MissingPackageError, match="cannot run the compiled programs") as missing:
        get_target(CHIP).load(exported_bundle, [replace(entry, files=(compiled,))], ONE)

    assert 'pip install "whisperport[qualcomm]"' in missing.value.hint
    assert f"{CHIP}.emulate=on" in missing.value.hint


# The embedded model on the NPU keeps its accuracy and its words.
#
# `make test-all` compiles it and decodes complete clips with every program in the vendor's simulator.
# `make test` reads what `make evidence` recorded.


# Lowest SQNR of `encoder` and `step` in dB. Measured with onnxruntime-qnn 2.7.0:
# in fp16 against float32, 53.3 and 55.1; in w8a16, 34.5 and 33.5.
LOWEST_DB = {"fp16": 50.0, "w8a16": 33.0}
CLIPS_AT = {"fp16": ("02-espeak-british.flac",), "w8a16": ()}  # (): all of the reference


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

    report = verify(bundle, run=ONE, clips=CLIPS_AT[precision])

    assert report, report.failures()
    for program in ("encoder", "step"):
        arrays = [one for one in report.checks if (one.level, one.program) == ("arrays", program)]
        assert min(one.value["sqnr_db"] for one in arrays) >= LOWEST_DB[precision], program
    (words,) = (one for one in report.checks if one.level == "words")
    assert words.value["wer"] == words.value["reference_wer"] == 0
    free = [one for one in report.checks if one.what.endswith(", free")]
    assert len(free) == words.value["clips"] == (len(CLIPS_AT[precision]) or 6)
    if precision == "fp16":
        assert all(one.value["n_same"] == one.value["n_expected"] for one in free)
