"""A manifest states the mask of a program if it is not the usual one; other values are rejected."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whisperport.errors import BundleError
from whisperport.program.bundle import Bundle, Manifest
from whisperport.program.masks import MASKED
from whisperport.program.placement import Placement

from ...embedded import default_bundle
from ...hostile_bundle import copy_of_shipped, program, read, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_shipped(tmp_path_factory.mktemp("masks") / "bundle")


def with_mask(folder: Path, name: str, mask: Any) -> Bundle:
    document = read(default_bundle())
    program(document, name)["placement"]["mask"] = mask
    write(folder, document)
    return Bundle.open(folder, check_hashes=False)


def test_a_manifest_without_masks_means_the_usual_one() -> None:
    text = json.dumps(read(default_bundle())["programs"])
    bundle = Bundle.open(default_bundle(), check_hashes=False)

    assert '"mask":' not in text.replace('"name": "mask"', "")
    assert {entry.placement.mask for entry in bundle.manifest.programs} == {MASKED}


@pytest.mark.parametrize("mask", [-64.0, -64, -16, -29_999.5])
def test_a_mask_is_read_as_it_was_written(folder: Path, mask: float) -> None:
    manifest = with_mask(folder, "step", mask).manifest

    assert manifest.program("step").placement.mask == mask
    assert manifest.program("align").placement.mask == MASKED
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_the_usual_mask_is_not_written(manifest: Manifest) -> None:
    (entry,) = manifest.programs
    bounded = replace(entry, placement=Placement("fake", mask=-64.0))

    assert "mask" not in entry.to_json()["placement"]
    assert bounded.to_json()["placement"]["mask"] == -64.0


@pytest.mark.parametrize(
    "mask", [0, 64, -1, -15.99, -30_001, -1e308, 2**60, "-64", None, True, [-64], {}]
)
def test_a_mask_out_of_range_or_of_another_type_is_rejected(folder: Path, mask: Any) -> None:
    with pytest.raises(BundleError, match=r"placement\.mask"):
        with_mask(folder, "step", mask)


@pytest.mark.parametrize("name", ["encoder", "cross_kv"])
def test_a_mask_of_a_program_without_one_is_rejected(folder: Path, name: str) -> None:
    with pytest.raises(BundleError, match="no input `mask`"):
        with_mask(folder, name, -64.0)
