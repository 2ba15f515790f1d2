"""`verify` with `record`: the result goes into the bundle, as evidence about its files."""

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
from whisperport.targets import RunOptions
from whisperport.verification import Report, machine
from whisperport.verification.bundle_check import verify
from whisperport.verification.clips import Clip
from whisperport.verification.evidence import today, with_evidence

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
