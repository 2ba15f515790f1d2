"""A status and `verified` follow from evidence about files that have not changed."""

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from whisperport.errors import BundleError
from whisperport.program.bundle import MANIFEST, Bundle, FileEntry, Manifest
from whisperport.program.bundle.writing import rewrite_manifest
from whisperport.program.checks import Check
from whisperport.program.evidence import KINDS, STATUSES, Evidence, Kind, status_of
from whisperport.verification import bundle_check

from .conftest import PASSED

FILE = "programs/encoder.bin"
CACHED = {"encoder", "cross_kv", "prefill_4", "prefill_64", "step", "align"}
FAILED = replace(PASSED, passed=False, reason="SQNR 3 dB is below 60 dB")


def evidence(
    kind: Kind, *, path: str = FILE, sha256: str = "a" * 64, check: Check = PASSED
) -> Evidence:
    ran = kind in ("emulated", "simulated", "run")
    return Evidence(
        kind=kind,
        files={path: sha256},
        runtime={"runtime": "1"},
        machine={"cores": 2},
        date="2026-11-22",
        checks=(check,) if ran else (),
    )


@pytest.fixture
def with_evidence(manifest: Manifest) -> Callable[..., Manifest]:
    """Make the manifest of one program with this evidence; the hash of its file is "aa…"."""

    def with_evidence(*found: Evidence) -> Manifest:
        entry = replace(manifest.programs[0], evidence=found)
        files = {FILE: FileEntry("a" * 64, 7), "other": FileEntry("b" * 64, 7)}
        return replace(manifest, programs=(entry,), files=files)

    return with_evidence


def test_each_kind_of_evidence_supports_one_status_and_emulation_the_weakest() -> None:
    found = {kind: status_of([evidence(kind)]) for kind in KINDS}

    assert found == {
        "partitioned": STATUSES[1],
        "compiled": STATUSES[2],
        "emulated": STATUSES[0],
        "simulated": STATUSES[3],
        "run": STATUSES[4],
    }
    assert status_of([]) == STATUSES[0] == "checked against vendor documentation"


def test_the_strongest_status_counts_in_whatever_order() -> None:
    both = [evidence("run"), evidence("compiled")]

    assert status_of(both) == status_of(reversed(both)) == "run here"


def test_a_run_that_compared_nothing_or_failed_is_not_a_run_here() -> None:
    assert status_of([replace(evidence("run"), checks=())]) == STATUSES[0]
    assert status_of([evidence("run", check=FAILED)]) == STATUSES[0]


@pytest.mark.parametrize("kind", KINDS)
def test_evidence_about_another_file_of_the_same_name_counts_for_nothing(
    with_evidence: Callable[..., Manifest], kind: Kind
) -> None:
    made = with_evidence(evidence(kind, sha256="c" * 64))

    assert made.evidence("encoder") == ()
    assert made.status("encoder") == STATUSES[0]
    assert not made.verified


def test_evidence_about_a_file_that_is_not_loaded_is_no_status(
    with_evidence: Callable[..., Manifest],
) -> None:
    """The lowered file may have run; the file that the vendor's compiler wrote has not."""
    made = with_evidence(evidence("run", path="other", sha256="b" * 64))

    assert len(made.evidence("encoder")) == 1
    assert made.status("encoder") == STATUSES[0]
    assert not made.is_verified("encoder")


def test_a_bundle_is_verified_by_emulation_but_not_by_compiling(
    with_evidence: Callable[..., Manifest],
) -> None:
    assert with_evidence(evidence("emulated")).verified
    assert not with_evidence(evidence("compiled")).verified
    assert with_evidence(evidence("compiled")).status("encoder") == "compiled here"


def test_the_last_run_decides(with_evidence: Callable[..., Manifest]) -> None:
    passed, failed = evidence("run"), evidence("run", check=FAILED)

    assert with_evidence(failed, passed).verified
    assert not with_evidence(passed, failed).verified


def test_no_evidence_helps_a_bundle_that_failed_when_it_was_written(
    with_evidence: Callable[..., Manifest],
) -> None:
    made = replace(with_evidence(evidence("run")), verification={"passed": False})

    assert made.failed
    assert not made.verified
    assert Manifest.from_bytes(made.to_bytes()).failed


def test_no_status_is_stored(bundle: Bundle) -> None:
    document = json.loads((bundle.folder / MANIFEST).read_bytes())

    assert bundle.manifest.verified
    assert "verified" not in document
    assert "status" not in document["programs"][0]


def test_evidence_needs_a_known_kind_and_a_file() -> None:
    with pytest.raises(ValueError, match="kind"):
        replace(evidence("run"), kind="guessed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no file"):
        replace(evidence("run"), files={})


@pytest.mark.parametrize(
    ("check", "programs"),
    [
        ("encoder", {"encoder"}),
        ("prefill", {"cross_kv", "prefill_4", "prefill_64", "vocab_projection"}),
        ("prefill, longer", {"cross_kv", "prefill_4", "prefill_64", "vocab_projection"}),
        ("prefill + step", {"cross_kv", "prefill_4", "prefill_64", "step", "vocab_projection"}),
        ("step", {"cross_kv", "step", "vocab_projection"}),
        ("align", {"cross_kv", "align"}),
        ("step_8", {"cross_kv", "step_8", "vocab_projection"}),
        ("uncached_decoder", {"uncached_decoder"}),
        ("vocab_projection", {"cross_kv", "vocab_projection"}),
        ("coarse_projection", {"coarse_projection"}),
        ("all programs", {*CACHED, "vocab_projection", "coarse_projection"}),
    ],
)
def test_a_check_involves_the_programs_that_computed_what_it_compared(
    check: str, programs: set[str]
) -> None:
    names = CACHED | {"step_8", "uncached_decoder", "vocab_projection", "coarse_projection"}

    assert {name for name in names if replace(PASSED, program=check).involves(name)} == programs


# Rewriting the manifest ----------------------------------------------------------------------------


def test_a_rewritten_manifest_has_a_new_checksum_and_nothing_else_is_touched(
    bundle: Bundle,
) -> None:
    before = {p: os.stat(p) for p in bundle.folder.rglob("*") if p.is_file() and p.name != MANIFEST}
    named = replace(bundle.manifest, name="another")

    made = rewrite_manifest(bundle, named)

    assert made.manifest == Bundle.open(bundle.folder).manifest == named
    after = {p: os.stat(p) for p in bundle.folder.rglob("*") if p.is_file() and p.name != MANIFEST}
    assert after == before
    assert list(bundle.folder.parent.iterdir()) == [bundle.folder]
    made.check_unchanged()


def test_a_bundle_that_was_replaced_meanwhile_keeps_its_manifest(
    bundle: Bundle, write: Callable[..., Bundle]
) -> None:
    opened = Bundle.open(bundle.folder)
    write(bundle.folder, program=b"another")
    raw = (bundle.folder / MANIFEST).read_bytes()

    with pytest.raises(BundleError, match="replaced"):
        rewrite_manifest(opened, replace(opened.manifest, name="another"))

    assert (bundle.folder / MANIFEST).read_bytes() == raw


def test_a_manifest_is_not_rewritten_while_another_process_writes_the_bundle(
    bundle: Bundle, write: Callable[..., Bundle]
) -> None:
    failures: list[BaseException] = []

    def rewrite() -> None:
        try:
            rewrite_manifest(bundle, bundle.manifest)
        except BaseException as error:
            failures.append(error)

    def meanwhile(_: Path) -> None:
        other = threading.Thread(target=rewrite)
        other.start()
        other.join()

    write(bundle.folder, then=meanwhile)

    assert [type(error) for error in failures] == [BundleError]


def test_a_bundle_that_is_not_writable_is_an_error_before_it_is_verified(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(bundle_check, "_verified", lambda *_, **__: pytest.fail("it was verified"))

    with pytest.raises(BundleError, match="cannot write the manifest"):
        bundle_check.verify(bundle, record=True)


def test_a_manifest_of_other_files_is_refused(bundle: Bundle) -> None:
    with pytest.raises(ValueError, match="the same files"):
        rewrite_manifest(bundle, replace(bundle.manifest, files={}))
