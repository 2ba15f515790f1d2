"""Manifests in which the vocabulary projection is a program of its own, right and wrong."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from whisperport.errors import BundleError
from whisperport.program.bundle import Bundle
from whisperport.program.signatures import LOGSUMEXP
from whisperport.runtime import load_engine
from whisperport.targets import RunOptions

from ...embedded import default_bundle
from ...hostile_bundle import copy_of_shipped, program, read, write

Document = dict[str, Any]
HIDDEN = {"name": "hidden", "dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_shipped(tmp_path_factory.mktemp("projection") / "bundle")


def opened(folder: Path, *changes: Callable[[Document], object]) -> Bundle:
    document = read(default_bundle())
    for change in changes:
        change(document)
    write(folder, document)
    return Bundle.open(folder, check_hashes=False)


def hidden(name: str, *shape: int) -> Callable[[Document], object]:
    """Let a program state that it returns hidden states, and no sum of exp(logit)."""

    def change(document: Document) -> None:
        spec = program(document, name)["spec"]
        others = [one for one in spec["outputs"][1:] if one["name"] != LOGSUMEXP]
        spec["outputs"] = [HIDDEN | {"shape": list(shape)}, *others]

    return change


def projection(
    *sizes: int, name: str = "logits_{}", shape: tuple[int, ...] = (1, 1, 128)
) -> Callable[[Document], None]:
    """List a program `vocab_projection` with outputs of these sizes, with another program's files."""

    def change(document: Document) -> None:
        entry = deepcopy(program(document, "step"))
        entry["spec"] = {
            "name": "vocab_projection",
            "inputs": [HIDDEN | {"shape": list(shape)}],
            "outputs": [
                {"name": name.format(i), "shape": [1, 1, size], "dtype": "float32"}
                for i, size in enumerate(sizes)
            ],
        }
        entry["evidence"] = []
        document["programs"].append(entry)

    return change


def test_hidden_states_and_a_projection_are_accepted(folder: Path) -> None:
    for listed in (
        projection(51865, name="logits"),
        projection(12966, 12966, 12966, 12967),
        projection(25932, 25933),
    ):
        manifest = opened(
            folder, hidden("step", 1, 1, 128), hidden("prefill_4", 1, 2, 128), listed
        ).manifest

        assert manifest.program("step").spec.outputs[0].name == "hidden"
        assert manifest.program("vocab_projection").spec.inputs[0].shape == (1, 1, 128)


@pytest.mark.parametrize(
    "change",
    [
        hidden("step", 1, 1, 127),
        hidden("step", 1, 2, 128),
        hidden("step", 1, 1, 1, 128),
        hidden("step", 1, 128),
        hidden("prefill_64", 1, 1, 128),
        hidden("align", 1, 128),
        hidden("encoder", 1, 128),
        projection(51865),
        projection(51864, name="logits"),
        projection(51865, name="logits", shape=(1, 2, 128)),
        projection(51865, name="logits", shape=(1, 128)),
        projection(51865, name="logits", shape=()),
        projection(12967, 12966, 12966, 12966),
        projection(12966, 12966, 12966, 12966),
        projection(*[1] * 1025),
        projection(),
        lambda document: rank4(document, ("align",)),
        lambda document: rank4(document, ("step",), by=2),
        lambda document: program(document, "step")["spec"]["inputs"][1]["shape"].insert(0, 1),
        lambda document: program(document, "step")["spec"]["inputs"][1]["shape"].insert(0, 2),
        lambda document: program(document, "cross_kv")["spec"]["outputs"][0]["shape"].insert(0, 1),
        lambda document: program(document, "cross_kv")["spec"]["outputs"][0]["shape"].append(1),
    ],
)
def test_other_shapes_and_rank_4_in_part_are_rejected(
    folder: Path, change: Callable[[Document], object]
) -> None:
    with pytest.raises(BundleError, match=r"`programs\[\d\]\.spec"):
        opened(folder, change)


def test_hidden_states_that_nothing_reads_are_found_before_audio_is_read(folder: Path) -> None:
    bundle = opened(folder, hidden("step", 1, 1, 128))

    with pytest.raises(BundleError):
        load_engine(bundle, RunOptions(threads=1, trust=True))


def rank4(document: Document, names: tuple[str, ...], by: int = 1) -> None:
    """Add leading axes to the mask, the logits and the K/V of programs."""
    for name in names:
        spec = program(document, name)["spec"]
        for tensor in (*spec["inputs"], *spec["outputs"]):
            if tensor["name"] not in ("x", "pick", "features"):
                tensor["shape"] = [1] * by + tensor["shape"]


@pytest.mark.parametrize(
    "names", [("cross_kv",), ("step",), ("cross_kv", "prefill_4", "prefill_64", "step")]
)
def test_programs_of_rank_4_are_accepted_together_with_others(
    folder: Path, names: tuple[str, ...]
) -> None:
    manifest = opened(folder, lambda document: rank4(document, names)).manifest

    for name in names:
        assert manifest.program(name).spec.outputs[-1].shape[0] == 1
