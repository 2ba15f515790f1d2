"""Evidence and origin of a bundle's files."""

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from whisperport.build.compile.artifacts import Artifact, put_artifacts
from whisperport.errors import BundleError
from whisperport.program.bundle import MANIFEST, Bundle, FileEntry, Manifest, origin
from whisperport.program.bundle.manifest import EMBEDDING
from whisperport.program.bundle.origin import is_recorded, record
from whisperport.program.bundle.writing import rewrite_manifest
from whisperport.program.checks import Check
from whisperport.program.evidence import KINDS, STATUSES, Evidence, Kind, status_of
from whisperport.verification import bundle_check
from whisperport.verification.evidence import today

from .conftest import PASSED

# A status and `verified` follow from evidence about files that have not changed.

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
        ("encoder_250", {"encoder_250"}),
        ("all programs", {*CACHED, "vocab_projection", "coarse_projection"}),
    ],
)
def test_a_check_involves_the_programs_that_computed_what_it_compared(
    check: str, programs: set[str]
) -> None:
    names = CACHED | {"step_8", "uncached_decoder", "vocab_projection", "coarse_projection"}
    names |= {"encoder_250"}

    assert {name for name in names if replace(PASSED, program=check).involves(name)} == programs


def test_only_texts_of_short_windows_involve_programs_for_a_length_of_audio() -> None:
    texts = replace(PASSED, program="all programs", what="short windows")

    assert texts.involves("encoder_250")
    assert texts.involves("cross_kv_250")
    assert texts.involves("encoder")


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


# Evidence when a compiled file is added to a bundle, and when it is replaced.

COMPILED = "fake/encoder.chip"


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., Bundle]:
    """Return `put(bundle, contents)`, which adds these contents as the compiled encoder."""

    def put(bundle: Bundle, contents: bytes, compiler: str = "a compiler") -> Bundle:
        path = tmp_path / "compiled"
        path.write_bytes(contents)
        facts = {"compiler": "2.1"}
        made = Artifact(path=path, suffix=".chip", facts=facts, compiler=compiler)
        put_artifacts(bundle, {"encoder": made})
        return Bundle.open(bundle.folder)

    return put


def kinds(bundle: Bundle) -> list[str]:
    return [one.kind for one in bundle.manifest.program("encoder").evidence]


def test_a_compiled_file_is_compiled_here_and_not_verified_by_what_ran_before(
    bundle: Bundle, put: Callable[..., Bundle]
) -> None:
    assert bundle.manifest.verified

    made = put(bundle, b"compiled").manifest

    assert made.status("encoder") == "compiled here"
    assert not made.verified
    assert not made.failed
    compiled = made.evidence("encoder")[-1]
    assert (compiled.kind, compiled.date) == ("compiled", today())
    assert compiled.files == {COMPILED: made.files[COMPILED].sha256}
    assert compiled.runtime == {"a compiler": "2.1"}


def test_a_file_that_somebody_else_compiled_has_no_evidence(
    bundle: Bundle, put: Callable[..., Bundle]
) -> None:
    made = put(bundle, b"published", compiler="").manifest

    assert made.status("encoder") == "checked against vendor documentation"
    assert not made.is_verified("encoder")


def test_a_file_that_is_replaced_loses_its_evidence_and_the_rest_stays(
    bundle: Bundle, put: Callable[..., Bundle]
) -> None:
    # given: a compiled file that ran on a device
    compiled = put(bundle, b"compiled")
    manifest = compiled.manifest
    (ran, _) = manifest.program("encoder").evidence
    on_device = replace(
        ran, files={COMPILED: manifest.files[COMPILED].sha256}, machine={"cpu": "x"}
    )
    compiled = _with(compiled, on_device)
    assert compiled.manifest.status("encoder") == "run here"
    assert compiled.manifest.verified

    replaced = put(compiled, b"compiled again")

    assert kinds(replaced) == ["run", "compiled"]  # of what was lowered, and of the new file
    assert replaced.manifest.status("encoder") == "compiled here"
    assert not replaced.manifest.verified


def test_the_same_file_compiled_again_keeps_one_record_and_what_ran(
    bundle: Bundle, put: Callable[..., Bundle]
) -> None:
    compiled = put(bundle, b"compiled")

    assert kinds(put(compiled, b"compiled")) == kinds(compiled) == ["run", "compiled"]


def test_a_file_that_changed_while_the_bundle_was_compiled_is_not_copied_as_if_it_were_right(
    bundle: Bundle, put: Callable[..., Bundle]
) -> None:
    # given: a bundle that was checked when it was opened, and whose embedding was damaged since
    damaged = bundle.folder / EMBEDDING
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    manifest = (bundle.folder / MANIFEST).read_bytes()

    with pytest.raises(BundleError, match=f"{EMBEDDING} .* has changed") as caught:
        put(bundle, b"compiled")

    assert "SHA-256" in caught.value.why
    assert (bundle.folder / MANIFEST).read_bytes() == manifest


def _with(bundle: Bundle, evidence: Evidence) -> Bundle:
    (entry,) = bundle.manifest.programs
    programs = (replace(entry, evidence=(*entry.evidence, evidence)),)
    return rewrite_manifest(bundle, replace(bundle.manifest, programs=programs))


# Records of this user's own bundles: what is recorded, where, and which records are ignored.

FIRST, SECOND = "a" * 64, "b" * 64


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "whisperport" / "bundles"


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_what_was_recorded_is_known_by_its_kind(state: Path) -> None:
    record("own", FIRST)
    record("own", FIRST)

    assert is_recorded("own", FIRST)
    assert not is_recorded("own", SECOND)
    assert not is_recorded("tried", FIRST)


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_records_are_for_their_user_only(state: Path) -> None:
    record("own", FIRST)

    assert state.stat().st_mode & 0o777 == 0o700
    assert [file.stat().st_mode & 0o777 for file in state.iterdir()] == [0o600]


@pytest.mark.skipif(os.name != "posix", reason="permissions")
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_to_is_not_believed(state: Path, mode: int) -> None:
    record("own", FIRST)
    state.chmod(mode)

    record("own", SECOND)

    assert not is_recorded("own", FIRST)
    assert len(list(state.iterdir())) == 1


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_a_folder_of_another_user_is_not_believed(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record("own", FIRST)

    monkeypatch.setattr(os, "geteuid", lambda: state.stat().st_uid + 1)

    assert not is_recorded("own", FIRST)


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_links_are_not_believed(state: Path, tmp_path: Path) -> None:
    # given: a folder elsewhere, and a link in place of the folder and of a record
    record("own", FIRST)
    os.rename(state, tmp_path / "elsewhere")
    state.symlink_to(tmp_path / "elsewhere")
    is_link_believed = is_recorded("own", FIRST)
    state.unlink()
    os.rename(tmp_path / "elsewhere", state)
    (state / f"own-{SECOND}").symlink_to(state / f"own-{FIRST}")

    assert not is_link_believed
    assert not is_recorded("own", SECOND)


@pytest.mark.skipif(os.name != "posix", reason="permissions")
@pytest.mark.parametrize("home", ["", "not/absolute", "/dev/null/state", "/proc/state"])
def test_where_nothing_can_be_recorded_nothing_is_known(
    home: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {"XDG_STATE_HOME": home, "HOME": "/dev/null"})

    record("own", FIRST)

    assert not is_recorded("own", FIRST)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_the_oldest_records_are_dropped(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "MAX_RECORDS", 3)
    for number in range(3):
        record("own", f"{number}" * 64)
        os.utime(state / f"own-{f'{number}' * 64}", (1000 + number, 1000 + number))

    record("tried", FIRST)

    assert sorted(file.name[:5] for file in state.iterdir()) == ["own-1", "own-2", "tried"]
