"""What the package says about its targets is computed from what was done with them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whisperport.program.bundle import Bundle
from whisperport.program.evidence import STATUSES
from whisperport.targets import TARGETS, Target
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
