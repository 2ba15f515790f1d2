"""Test the fuzzer: seeds are accepted, and a few mutated inputs of every format are handled.

`make fuzz` runs thousands. The two formats that need XNNPACK's compiler for their seeds are only run there.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fuzz.campaign import Campaign
from fuzz.formats import all_formats
from fuzz.mutators import archives, folders, json_values, onnx_graphs, raw, wire

from fuzz import seeds

from ..embedded import default_bundle

COMPILED = ("bundle-xnnpack", "pte")
QUICK = {
    name: entry
    for name, entry in all_formats().items()
    if not set(entry.groups) & set(COMPILED) and not name.endswith("run")
}


@pytest.fixture(scope="module")
def seeds_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the seeds of the quick formats; the shipped bundle replaces an exported one."""
    folder = tmp_path_factory.mktemp("seeds")
    shutil.copytree(default_bundle(), folder / "bundle-onnxruntime" / "bundle")
    for group in sorted({group for entry in QUICK.values() for group in entry.groups}):
        seeds.folder_of(group, folder)
    return folder


@pytest.fixture
def nothing_mutated(monkeypatch: pytest.MonkeyPatch) -> None:
    def same(data: bytes, *_: Any, **__: Any) -> bytes:
        return data

    for module in (raw, wire, onnx_graphs, json_values, archives):
        monkeypatch.setattr(module, "mutated", same)
    monkeypatch.setattr(folders, "mutate", lambda *_, **__: None)


@pytest.mark.usefixtures("nothing_mutated")
@pytest.mark.parametrize("name", [name for name in QUICK if "bundle" not in name])
def test_an_input_that_is_not_mutated_is_accepted(
    name: str, seeds_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted = 0
    for number in range(12):  # some inputs are hostile without a mutation, such as pickles
        folder = tmp_path / str(number)
        folder.mkdir()
        QUICK[name].make(Random(number), seeds_folder, folder, str(tmp_path / "outside"))
        try:
            QUICK[name].run(folder)
        except Exception:
            continue
        accepted += 1
        break

    assert accepted


def test_a_few_mutated_inputs_of_every_format_are_handled(
    seeds_folder: Path, tmp_path: Path
) -> None:
    formats = [
        replace(entry, share=1 if entry.reader == "transcribe" else 5) for entry in QUICK.values()
    ]
    campaign = Campaign(
        formats=formats,
        count=sum(entry.share for entry in formats),
        seed=7,
        jobs=1,
        seeds=seeds_folder,
        work=tmp_path / "work",
        findings=tmp_path / "findings",
        progress=lambda _: None,
    )

    campaign.run()

    assert campaign.found == {}
    assert all(tally.inputs for tally in campaign.tallies.values())
