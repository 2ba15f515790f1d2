"""Evidence when a compiled file is added to a bundle, and when it is replaced."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from whisperport.build.compile.artifacts import Artifact, put_artifacts
from whisperport.errors import BundleError
from whisperport.program.bundle import MANIFEST, Bundle
from whisperport.program.bundle.manifest import EMBEDDING
from whisperport.program.bundle.writing import rewrite_manifest
from whisperport.program.evidence import Evidence
from whisperport.verification.evidence import today

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
