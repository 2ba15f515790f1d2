"""`verify` with `record`: the result goes into the bundle, as evidence about its files."""

import getpass
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.program.bundle import MANIFEST, Bundle
from whisperport.program.bundle.origin import is_trusted
from whisperport.program.evidence import STATUSES
from whisperport.targets import TARGETS, RunOptions, Target
from whisperport.verification import Report, machine, versions
from whisperport.verification.bundle_check import verify
from whisperport.verification.clips import Clip
from whisperport.verification.evidence import today, with_evidence
from whisperport.verification.project_evidence import (
    by_target,
    evidence_file,
    evidence_rows,
    project_evidence,
    project_status,
    status_words,
    to_bytes,
)

from ..embedded import default_bundle
from ..extent import EVERYTHING

# `verify` with `record`: the result goes into the bundle, as evidence about its files.

HISS = (0.1 * np.random.default_rng(0).standard_normal(1_600)).astype(np.float32)
OPTIONS = ExportOptions(clips=(Clip("hiss", "so they say", HISS),), run=RunOptions(threads=1))


@pytest.fixture
def bundle(micro_checkpoint: Any, fake_targets: Any, quick_tracing: None, tmp_path: Path) -> Bundle:
    return export(micro_checkpoint, "fake", tmp_path / "bundle", OPTIONS)


@pytest.fixture
def forgotten(bundle: Bundle) -> Bundle:
    """The bundle as it would be if its files had never been run."""
    programs = tuple(replace(entry, evidence=()) for entry in bundle.manifest.programs)
    manifest = replace(bundle.manifest, programs=programs)
    (bundle.folder / MANIFEST).write_bytes(manifest.to_bytes())
    return Bundle.open(bundle.folder)


def test_an_export_records_for_each_program_what_was_compared(bundle: Bundle) -> None:
    manifest = Bundle.open(bundle.folder).manifest

    assert manifest.verified
    for entry in manifest.programs:
        (one,) = manifest.evidence(entry.spec.name)
        assert (one.kind, one.date) == ("run", today())
        assert dict(one.files) == {path: manifest.files[path].sha256 for path in entry.files}
        assert one.machine == machine()
        assert one.checks
        assert all(check.involves(entry.spec.name) for check in one.checks)
        assert all(check.value for check in one.checks)


def test_what_was_never_run_is_recorded_where_it_runs_and_nothing_else_changes(
    forgotten: Bundle,
) -> None:
    names = [entry.spec.name for entry in forgotten.manifest.programs]
    before = {p: p.stat() for p in forgotten.folder.rglob("*") if p.name != MANIFEST}
    assert not forgotten.manifest.verified

    report = verify(forgotten.folder, record=True, run=RunOptions(threads=1, trust=True))

    manifest = Bundle.open(forgotten.folder).manifest
    assert report
    assert manifest.verified
    assert {manifest.status(name) for name in names} == {"run here"}
    stripped = tuple(replace(entry, evidence=()) for entry in manifest.programs)
    assert replace(manifest, programs=stripped) == forgotten.manifest
    kept = {p: p.stat() for p in before if p.is_file()}
    assert all(before[p].st_mtime_ns == now.st_mtime_ns for p, now in kept.items())


def test_recording_twice_on_a_machine_keeps_one_record_and_the_owners_trust(bundle: Bundle) -> None:
    assert is_trusted(bundle)

    verify(bundle.folder, record=True, run=RunOptions(threads=1))

    again = Bundle.open(bundle.folder)
    assert is_trusted(again)
    assert all(len(entry.evidence) == 1 for entry in again.manifest.programs)


def test_a_run_that_failed_is_recorded_too_and_decides(
    bundle: Bundle, fake_targets: dict[str, Any]
) -> None:
    fake_targets["fake"].wrong = {"step": {"x": lambda x: x + 1, "logits": lambda x: -x}}

    report = verify(bundle.folder, record=True, run=RunOptions(threads=1))

    manifest = Bundle.open(bundle.folder).manifest
    assert not report
    assert not manifest.is_verified("step")
    assert not manifest.verified
    assert not manifest.failed  # that is for what failed when it was written


def test_evidence_of_another_machine_is_kept_beside(bundle: Bundle) -> None:
    report = verify(bundle, run=RunOptions(threads=1))
    elsewhere = replace(report, machine={"cpu": "a board"})

    made = with_evidence(bundle.manifest, elsewhere, {})

    assert [one.machine.get("cpu") for one in made.program("step").evidence] == [
        machine()["cpu"],
        "a board",
    ]


def test_emulation_of_a_compiled_program_is_evidence_about_what_was_lowered_only(
    exported: Callable[..., Bundle],
) -> None:
    bundle = exported("hailo8l")
    entry = bundle.manifest.program("encoder")
    compiled = replace(entry, files=("hailo8l/encoder.hef", *entry.files), evidence=())
    files = {
        **bundle.manifest.files,
        "hailo8l/encoder.hef": next(iter(bundle.manifest.files.values())),
    }
    manifest = replace(bundle.manifest, programs=(compiled,), files=files)
    report = Report.from_json(bundle.manifest.verification)

    made = with_evidence(manifest, report, {"hailo8l.emulate": "on"})

    (one,) = made.program("encoder").evidence
    assert one.kind == "emulated"
    assert set(one.files) == set(entry.files)
    assert not made.is_verified("encoder")


# What the package says about its targets is computed from what was done with them.

FILES = sorted({evidence_file(target) for target in TARGETS})
# `make evidence` exports for every target that runs the encoder.
RUNS_THE_ENCODER = [t for t in TARGETS if not t.unsupported("encoder", t.spec.runs.precisions[0])]
every_target = pytest.mark.parametrize(
    "target", RUNS_THE_ENCODER, ids=lambda target: target.spec.name
)


@every_target
def test_every_target_has_evidence_with_a_version_a_date_and_comparisons(target: Target) -> None:
    found = project_evidence(target.spec.name)

    assert found
    for one in found:
        assert one.date
        assert set(one.runtime.values()).isdisjoint({"", "not installed"})
        assert one.machine["cpu"]
        assert one.passed
        assert all(path.startswith(f"{target.spec.name}/") for path in one.files)


@every_target
def test_a_target_that_was_only_emulated_has_the_weakest_status(target: Target) -> None:
    kinds = {one.kind for one in project_evidence(target.spec.name)}

    assert (project_status(target.spec.name) == STATUSES[0]) == (kinds == {"emulated"})
    assert status_words(target.spec.name).endswith("emulated on the CPU") == ("emulated" in kinds)


def test_the_files_hold_no_target_that_is_not_there() -> None:
    found = [name for file in FILES for name in json.loads(file.read_bytes())]

    assert sorted(found) == sorted(target.spec.name for target in RUNS_THE_ENCODER)


def test_a_target_without_evidence_has_the_weakest_status(fake_targets: dict[str, Any]) -> None:
    assert project_status("fake") == status_words("fake") == STATUSES[0]
    assert evidence_rows("fake") == []


@pytest.mark.skipif(not EVERYTHING, reason="runs all programs twice; run make test-all")
def test_the_evidence_of_all_programs_of_a_target_becomes_one_with_every_check_counted_once() -> (
    None
):
    manifest = Bundle.open(default_bundle(), check_hashes=False).manifest

    ((one,),) = by_target(manifest).values()

    assert set(one.files) == {path for entry in manifest.programs for path in entry.files}
    compared = sum(check.value["compared"] for check in one.checks)
    assert compared == len(manifest.verification["checks"])
    assert one.kind == "run"
    assert one.passed


def test_one_failed_comparison_fails_the_evidence_of_its_program() -> None:
    manifest = Bundle.open(default_bundle(), check_hashes=False).manifest
    (first, *others) = manifest.programs
    (own,) = manifest.evidence(first.spec.name)
    (check, *checks) = own.checks
    failed = replace(own, checks=(replace(check, passed=False, reason="too far"), *checks))
    programs = (replace(first, evidence=(failed,)), *others)

    (found,) = by_target(replace(manifest, programs=programs))["onnxruntime"]

    assert not found.passed
    assert [one.reason for one in found.checks if not one.passed] == ["too far"]


def test_two_tools_that_ran_a_program_are_two_pieces_of_evidence() -> None:
    # given: torch emulated the lowered file, and another tool the quantized graph
    manifest = Bundle.open(default_bundle(), check_hashes=False).manifest
    (first, *others) = manifest.programs
    own = manifest.evidence(first.spec.name)
    other = replace(own[0], runtime={"another tool": "1"})
    programs = (replace(first, evidence=(*own, other)), *others)

    found = by_target(replace(manifest, programs=programs))["onnxruntime"]

    assert [sorted(one.runtime) for one in found] == [["onnxruntime"], ["another tool"]]
    assert list(found[1].files) == list(first.files)


def test_evidence_about_files_that_changed_is_ignored() -> None:
    manifest = Bundle.open(default_bundle(), check_hashes=False).manifest
    changed = {path: replace(entry, sha256="0" * 64) for path, entry in manifest.files.items()}

    assert by_target(replace(manifest, files=changed)) == {"onnxruntime": ()}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_is_what_the_chore_writes(file: Path) -> None:
    names = json.loads(file.read_bytes())

    assert file.read_bytes() == to_bytes({name: project_evidence(name) for name in names})


def test_the_machine_is_described_and_its_owner_is_not() -> None:
    found = machine()

    assert found["cpu"]
    assert found["cores"] >= 1
    assert found["memory_mib"] > 100
    assert found["python"].startswith("CPython 3.")
    assert json.loads(json.dumps(found)) == found
    words = " ".join(str(value) for value in found.values()).split()
    assert not any(word.startswith("/") for word in words)
    assert not {socket.gethostname(), getpass.getuser()} & set(words)


def test_versions_say_what_is_not_installed() -> None:
    found = versions(["numpy", "no-such-distribution"])

    assert found["numpy"][0].isdigit()
    assert found["no-such-distribution"] == "not installed"
