"""A bundle with every program on the NPU: accepted by the partitioner, and compiled with a fake SDK.

The partitioner is the real one. The SDK is a fake: it shows what whisperport does with files and text.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from whisperport.build.compile.compile import CompileOptions, compile
from whisperport.build.inspect import inspect
from whisperport.errors import MissingPackageError, UsageError
from whisperport.program.bundle import Bundle
from whisperport.system.child import StoppedError
from whisperport.system.progress import reporting
from whisperport.targets import get_target
from whisperport.targets.vendors.mediatek import partitioner
from whisperport.verification.evidence import with_partitions

from ....extent import core_or_all
from . import fake_ncc_tflite as fake
from .test_programs import ALL, BOARD, PART, on_the_npu

REASON = get_target(BOARD).partitioner.unavailable()


@pytest.fixture
def bundle(
    exported: Callable[..., Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    for name in ("WHISPERPORT_TOOLCHAIN_MEDIATEK", "MTK_NEURON_SDK"):
        monkeypatch.delenv(name, raising=False)
    made = exported(BOARD, "one layer", placement=core_or_all(PART, ALL))
    return shutil.copytree(made.folder, tmp_path / "bundle")


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_export_records_that_the_partitioner_accepts_every_operator_of_every_program(bundle):
    opened = Bundle.open(bundle)
    manifest = opened.manifest
    for entry in on_the_npu(opened):
        (evidence,) = [
            one for one in manifest.evidence(entry.spec.name) if one.kind == "partitioned"
        ]
        assert evidence.passed
        assert "ai-edge-litert" in evidence.runtime
        (check,) = evidence.checks
        assert check.level == "operators"
        # At least a product and another operator for each output: the list is not empty by mistake.
        assert check.value["accepted"] == check.value["operators"] >= 2 * len(entry.spec.outputs)
        assert manifest.status(entry.spec.name) == "accepted by the vendor's partitioner"


def test_without_an_sdk_a_work_folder_is_left_for_another_machine(bundle, tmp_path, monkeypatch):
    before = Bundle.open(bundle).manifest
    work = bundle.with_name("bundle.compile") / BOARD
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(MissingPackageError) as raised:
        compile(bundle)
    assert "MTK_NEURON_SDK=/path/to/sdk python compile.py" in raised.value.hint
    assert Bundle.open(bundle).manifest == before
    sdk = fake.install(tmp_path / "sdk")  # on another machine

    subprocess.run(
        [sys.executable, "-I", "-S", work / "compile.py"],
        env={"MTK_NEURON_SDK": str(sdk), "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
    )
    made = compile(bundle)

    assert {program.name for program in made.programs} == {
        entry.spec.name for entry in on_the_npu(made.bundle)
    }
    assert {program.compiler for program in made.programs} == {"8.0.10"}
    (evidence,) = [e for e in made.bundle.manifest.evidence("step") if e.kind == "compiled"]
    assert evidence.machine == {}  # whose machine it was is not known


def test_a_compiled_bundle_has_the_compiled_files_first_and_keeps_the_others(bundle, tmp_path):
    sdk = fake.install(tmp_path / "sdk", plan=["Target: MDLA_5_3", "OP[7]: MEAN", "Target: CPU"])

    made = compile(bundle, CompileOptions(toolchains={"mediatek": str(sdk)}))

    compiled = on_the_npu(made.bundle)
    for entry in compiled:
        name = entry.spec.name
        assert entry.files == (f"{BOARD}/{name}.dla", f"{BOARD}/{name}.tflite")
        assert entry.facts.plan == {"MDLA_5_3": 1, "CPU": 1}
        assert made.bundle.manifest.status(name) == "compiled here"
        assert not made.bundle.manifest.is_verified(name)  # the compiled file was never run
        kinds = {one.kind for one in made.bundle.manifest.evidence(name)}
        assert "run" not in kinds
        assert kinds >= {"compiled", "emulated"}
    (note,) = made.programs[0].notes
    assert "on CPU, not on MDLA_5_3" in note
    inspected = inspect(bundle)
    assert [plan.engines for plan in inspected.plans] == [{"MDLA_5_3": 1, "CPU": 1}] * len(compiled)
    assert inspected.plans[0].notes == (note,)


def test_a_flag_of_whisperport_itself_is_rejected_before_anything_is_written(bundle):
    options = {f"{BOARD}.flags": "--exec"}
    with pytest.raises(UsageError, match=r"`--exec` .* is not for the user"):
        compile(bundle, CompileOptions(options=options))


def test_a_partitioner_that_cannot_be_asked_leaves_no_evidence_and_is_told(bundle, monkeypatch):
    opened = Bundle.open(bundle)
    without = replace(
        opened.manifest, programs=tuple(replace(e, evidence=()) for e in opened.manifest.programs)
    )
    monkeypatch.setattr(partitioner, "_package_folder", lambda: None)
    told: list[str] = []

    with reporting(told.append):
        after = with_partitions(without, bundle)

    assert all(not entry.evidence for entry in after.programs)
    assert len(told) == len(on_the_npu(opened))
    assert all("ai-edge-litert is not installed" in line for line in told)


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_partitioner_that_declines_gives_failed_evidence_and_one_that_fails_gives_none(
    bundle, monkeypatch, caplog
):
    opened = Bundle.open(bundle)
    encoder = replace(opened.manifest.program("encoder"), evidence=())
    only = replace(opened.manifest, programs=(encoder,))

    def declining(*_: object, **__: object) -> dict[str, object]:
        declined = [("GATHER", "t", "why")]
        return {"total": 2, "partitions": 1, "declined": declined, "version": "2.3.0"}

    monkeypatch.setattr(partitioner, "run_limited", declining)
    declined = with_partitions(only, bundle)
    (evidence,) = declined.programs[0].evidence
    assert not evidence.passed
    assert evidence.checks[0].reason == "1 of 2 operators were declined: GATHER"
    assert declined.status("encoder") == "checked against vendor documentation"

    def failing(*_: object, **__: object) -> None:
        raise StoppedError("it took more than 1 seconds")

    monkeypatch.setattr(partitioner, "run_limited", failing)
    assert with_partitions(only, bundle) == only
    assert "it took more than 1 seconds" in caplog.text
