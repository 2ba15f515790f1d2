"""What of Whisper XNNPACK takes: everything, read off the file that is written."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from whisperport.errors import BundleError
from whisperport.model.network.decoder import Decode
from whisperport.model.network.whisper import Whisper
from whisperport.model.rewrites import run_rewrites
from whisperport.model.trace.program import Program, trace
from whisperport.program.bundle import Bundle
from whisperport.targets import RunOptions, get_target
from whisperport.targets.cpu.xnnpack.lowering import Delegation, read_delegation
from whisperport.targets.cpu.xnnpack.target import FILE

from ..extent import core_or_all
from ..published_dims import whisper_dims

XNNPACK = get_target("xnnpack")

# All blocks are alike: one of each kind shows what is delegated.
LAYERS = core_or_all(1, 4)
# The vocabulary is one linear, whose size alone differs.
TINY = replace(whisper_dims(384, LAYERS), n_vocab=core_or_all(1000, 51865))


@pytest.fixture(scope="module")
def tiny() -> list[Program]:
    """whisper-tiny's two programs that matter most, in its true widths; the others are in every bundle.

    Weights are zeros: no node depends on them.
    """
    with torch.device("meta"):
        model = Whisper(TINY)
    model = model.to_empty(device="cpu").eval()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    x, mask = torch.zeros(1, 1, 384), torch.zeros(1, 1, 449)
    shapes = [(6, 64, 448), (6, 448, 64), (6, 64, 1500), (6, 1500, 64)]
    caches = tuple([torch.zeros(shape) for _ in range(LAYERS)] for shape in shapes)
    return [
        trace("encoder", model.encoder, (torch.zeros(1, 80, 3000),)),
        trace("step", Decode(model.decoder), (x, mask, *caches)),
    ]


@pytest.fixture(scope="module")
def delegation(
    tiny: list[Program], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Delegation]:
    folder = tmp_path_factory.mktemp("tiny")
    rewritten = [run_rewrites(program, XNNPACK.spec.rewrites)[0] for program in tiny]
    entries = XNNPACK.lower(rewritten, folder, lambda _: None)
    found = read_delegation((folder / FILE).read_bytes())
    (folder / FILE).unlink()  # 240 MB
    assert {entry.method: entry.facts.undelegated for entry in entries} == {
        name: of.undelegated for name, of in found.items()
    }
    return found


@pytest.mark.parametrize("program", ["encoder", "step"])
def test_a_program_of_whisper_tiny_is_one_subgraph_and_nothing_else(
    delegation: dict[str, Delegation], program: str
) -> None:
    assert delegation[program] == Delegation(program, subgraphs=1, undelegated=())


def test_without_the_rewrite_layer_norms_stay_outside(tmp_path: Any) -> None:
    """The reading above can fail."""
    block = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))
    naive = trace("naive", block, (torch.zeros(1, 7, 64),))

    (entry,) = XNNPACK.lower([naive], tmp_path, lambda _: None)

    found = read_delegation((tmp_path / FILE).read_bytes())["naive"]
    assert found.subgraphs == 1  # linear and GELU, between the two
    assert len([name for name in found.undelegated if "layer_norm" in name]) == 2
    assert entry.facts.undelegated == found.undelegated


def test_the_check_foresees_what_stays_outside() -> None:
    naive = trace("naive", nn.LayerNorm(64), (torch.zeros(1, 7, 64),))
    rewritten, _ = run_rewrites(naive, XNNPACK.spec.rewrites)

    before, after = XNNPACK.check(naive), XNNPACK.check(rewritten)

    assert [(refusal.node, refusal.rule) for refusal in before] == [("layer_norm", "WP101")]
    assert after == []


def test_an_operator_that_it_cannot_lower_is_refused_beforehand() -> None:
    class Sorted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sort(x).values

    rejections = XNNPACK.check(trace("sorted", Sorted(), (torch.zeros(1, 8),)))

    assert [refusal.reason for refusal in rejections] == [
        "sort is not in the list of supported operators"
    ]


@pytest.mark.parametrize("threads", [1, 2])
def test_as_many_threads_as_asked_for(exported: Callable[[str], Bundle], threads: int) -> None:
    from executorch.extension.pybindings import portable_lib

    bundle = exported("xnnpack")

    XNNPACK.load(bundle.folder, bundle.manifest.programs, RunOptions(threads=threads))

    assert portable_lib._threadpool_get_thread_count() == threads


def test_a_method_that_is_not_in_the_file_is_refused(exported: Callable[[str], Bundle]) -> None:
    bundle = exported("xnnpack")
    entry = replace(bundle.manifest.program("step"), method="no_such_method")

    with pytest.raises(BundleError, match="no_such_method"):
        XNNPACK.load(bundle.folder, [entry], RunOptions(threads=1))


def test_a_program_of_which_nothing_is_delegated_still_runs(tmp_path: Any) -> None:
    program = trace("norm", nn.LayerNorm(8), (torch.zeros(1, 8),), ["y"])
    x = np.array([[3, 1, 2, 0, 7, 6, 5, 4]], np.float32)

    entries = XNNPACK.lower([program], tmp_path, lambda _: None)
    y = XNNPACK.load(tmp_path, entries, RunOptions(threads=1))["norm"].run({"input": x})["y"]

    assert entries[0].facts.subgraphs == 0
    assert len(entries[0].facts.undelegated) == 1
    np.testing.assert_allclose(y, (x - 3.5) / np.sqrt(5.25), atol=1e-5)  # 1e-5 in its root, too


def test_one_program_of_a_process_runs_at_a_time(exported: Callable[[str], Bundle]) -> None:
    """Methods of one file share its memory, and all files share the thread pool."""
    bundle = exported("xnnpack")
    entries = bundle.manifest.programs

    loads = [XNNPACK.load(bundle.folder, entries, RunOptions(threads=1)) for _ in range(2)]

    assert len({id(runner.run_lock) for runners in loads for runner in runners.values()}) == 1


def test_what_executorch_prints_when_it_is_imported_stays_off_the_screen() -> None:
    lower = "from whisperport.targets import get_target; from pathlib import Path; import tempfile"
    lower += "; get_target('xnnpack').lower([], Path(tempfile.mkdtemp()), lambda _: None)"

    ran = subprocess.run([sys.executable, "-c", lower], capture_output=True, text=True)

    assert ran.stdout == ""
    assert "Failed to load" not in ran.stderr
    assert "deprecated" not in ran.stderr
