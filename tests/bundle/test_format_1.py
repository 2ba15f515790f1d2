"""Bundles that whisperport wrote before format version 2 are still read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whisperport.bundle import Bundle, Manifest
from whisperport.errors import BundleError
from whisperport.transcription import Transcriber
from whisperport.verification.clips import shipped_audio

from .. import hostile_bundle
from ..embedded import default_bundle
from ..extent import core_or_all

STORED = Path(__file__).parent / "format_1" / "manifest.json"  # of the shipped bundle, in July 2026
UNRUN = "checked against vendor documentation"


def stored() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(STORED.read_bytes())
    del document["checksum"]
    return document


def changed(change: Callable[[dict[str, Any]], object]) -> Manifest:
    document = stored()
    change(document)
    return Manifest.from_json(document)


def of_a_chip(document: dict[str, Any], status: str, **facts: Any) -> None:
    """Change the encoder to one that was lowered for a chip and verified by emulation."""
    document["programs"][0] |= {"target": "chip", "status": status}
    document["programs"][0]["delegation"] |= facts


def test_a_stored_bundle_of_format_1_opens_transcribes_and_is_verified(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(default_bundle(), folder)
    hostile_bundle.write(folder, stored())
    hostile_bundle.rehash(folder)  # the shipped programs may have been exported again since

    opened = Bundle.open(folder)
    text = Transcriber(folder).transcribe(shipped_audio()[0].path).text

    assert opened.manifest.format_version == 2
    assert opened.manifest.verified
    assert {opened.manifest.status(e.spec.name) for e in opened.manifest.programs} == {"run here"}
    assert text == Transcriber(default_bundle()).transcribe(shipped_audio()[0].path).text


def test_what_version_1_ran_here_is_evidence_with_its_numbers_and_versions() -> None:
    encoder = Manifest.from_bytes(STORED.read_bytes()).program("encoder")

    (evidence,) = encoder.evidence
    assert evidence.kind == "run"
    assert set(evidence.files) == set(encoder.files)
    assert evidence.runtime["onnxruntime"] == "1.31.1"
    assert {check.program for check in evidence.checks} == {"encoder", "all programs"}
    assert evidence.date == ""  # version 1 stored none
    assert encoder.placement.precision == "fp32"


def test_a_program_of_a_chip_that_was_emulated_is_not_said_to_have_run() -> None:
    manifest = changed(lambda d: of_a_chip(d, "checked against contract"))

    assert manifest.status("encoder") == UNRUN
    assert manifest.is_verified("encoder")
    assert [one.kind for one in manifest.program("encoder").evidence] == ["emulated"]
    assert manifest.verified


def test_a_compiled_file_does_not_inherit_what_emulation_showed() -> None:
    """Version 1 kept `verified: true` when the compiled file was added."""
    manifest = changed(lambda d: of_a_chip(d, "compiled here", compiler="3.31.0"))

    assert manifest.status("encoder") == "compiled here"
    assert manifest.program("encoder").evidence[-1].runtime == {"compiler": "3.31.0"}
    assert not manifest.is_verified("encoder")
    assert not manifest.verified
    assert not manifest.failed


def test_an_imported_file_does_not_either() -> None:
    manifest = changed(lambda d: of_a_chip(d, "checked against contract", imported="a.bin"))

    assert manifest.status("encoder") == UNRUN
    assert not manifest.is_verified("encoder")
    assert manifest.is_verified("step")


def test_a_bundle_that_failed_stays_marked() -> None:
    manifest = changed(lambda d: d.update(verified=False))

    assert manifest.failed
    assert not manifest.verified
    assert {manifest.status(e.spec.name) for e in manifest.programs} == {UNRUN}


def test_the_decoder_without_a_cache_is_verified_by_its_own_checks() -> None:
    def add(document: dict[str, Any]) -> None:
        document["programs"].append(json.loads(json.dumps(document["programs"][0])))
        document["programs"][-1]["spec"]["name"] = "decode_full"
        rows = document["verification"]["checks"]
        rows += [row | {"program": "decode_full"} for row in rows if row["program"] == "encoder"]

    manifest = changed(add)

    (evidence,) = manifest.program("uncached_decoder").evidence
    assert {check.program for check in evidence.checks} == {"uncached_decoder"}
    assert manifest.is_verified("uncached_decoder")
    (of_step,) = manifest.program("step").evidence
    assert not any(check.program == "uncached_decoder" for check in of_step.checks)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (("programs", 0, "status"), "probably fine"),
        (("programs", 0, "files"), ["../../etc/passwd"]),
        (("programs", 0, "surprise"), 1),
        (("verified",), "yes"),
        (("precision",), None),
        (("precision",), ""),
        (("verification",), []),
        (("verification", "checks", 0, "value"), {}),
        (("verification", "checks"), {}),
        (("verification", "machine"), []),
        (("files",), []),
        (("files", "tokenizer.json"), "a hash"),
        (("files", "onnxruntime/step.onnx", "sha256"), 1),
        (("surprise",), 1),
    ],
)
def test_an_impossible_value_is_refused_with_its_field(field: tuple[Any, ...], value: Any) -> None:
    def set_it(document: dict[str, Any]) -> None:
        place: Any = document
        for step in field[:-1]:
            place = place[step]
        place[field[-1]] = value

    with pytest.raises(BundleError, match="is not valid"):
        changed(set_it)


def test_what_is_read_is_written_as_format_2_and_read_again() -> None:
    manifest = changed(lambda d: of_a_chip(d, "compiled here", compiler="3.31.0"))

    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert json.loads(manifest.to_bytes())["format_version"] == 2


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 2), st.text(max_size=3), st.just({}), st.just([])
)


@settings(max_examples=core_or_all(100, 1000), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_value_anywhere_raises_a_bundle_error_or_nothing(data: st.DataObject) -> None:
    document = stored()
    del document["programs"][1:]
    place: Any = document
    while isinstance(place, dict | list) and place:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        holder, key = place, data.draw(st.sampled_from(keys))
        place = place[key]
        if data.draw(st.booleans()):
            break
    holder[key] = data.draw(SCALARS)

    try:
        read = Manifest.from_json(document)
    except BundleError:
        return

    assert Manifest.from_bytes(read.to_bytes()) == read


@pytest.mark.parametrize("name", ["programs", "precision", "verification", "verified", "files"])
def test_a_missing_member_is_named(name: str) -> None:
    with pytest.raises(BundleError, match=f"has no `{name}`"):
        changed(lambda document: document.pop(name))
