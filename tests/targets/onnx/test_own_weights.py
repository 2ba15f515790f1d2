"""`step_B` has packed weights of its own, from the first run on."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from whisperport.errors import BundleError
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.bundle import ProgramEntry
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.program.runner import Runner
from whisperport.targets import RunOptions, get_target
from whisperport.targets.cpu import onnxruntime
from whisperport.targets.onnx.runner import OnnxRunner
from whisperport.targets.onnx.weights import OwnWeights

ORT = get_target("onnxruntime")
BATCH = "step_2"


@pytest.fixture(scope="module")
def original(
    micro: Whisper, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[ProgramEntry]]:
    folder = tmp_path_factory.mktemp("lowered")
    programs = list(whisper_programs(Parts(micro, [(0, 0)]), ["step", BATCH]))
    return folder, ORT.lower(programs, folder)


@pytest.fixture
def lowered(
    original: tuple[Path, list[ProgramEntry]], tmp_path: Path
) -> tuple[Path, list[ProgramEntry]]:
    """A copy of the files, for a test that changes them."""
    folder, entries = original
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path, entries


def loaded(folder: Path, entries: list[ProgramEntry]) -> OnnxRunner:
    runner = ORT.load(folder, entries, RunOptions(threads=1))[BATCH]
    assert isinstance(runner, OnnxRunner)
    return runner


def results(runner: Runner) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    feed = {t.name: random.standard_normal(t.shape).astype(t.dtype) for t in runner.spec.inputs}
    return list(runner.run(feed).values())


def test_it_is_loaded_when_it_is_first_used_and_computes_the_same(
    lowered: tuple[Path, list[ProgramEntry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = loaded(*lowered)
    assert own._made is None
    monkeypatch.setattr(
        onnxruntime, "LARGEST", 0
    )  # the copy of a large model takes too much memory
    shared = loaded(*lowered)
    assert shared._made is not None

    for found, expected in zip(results(own), results(shared), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert own._made is not None


def test_files_that_are_replaced_after_loading_do_not_matter(
    lowered: tuple[Path, list[ProgramEntry]],
) -> None:
    folder, entries = lowered
    expected = results(loaded(folder, entries))
    runner = loaded(folder, entries)

    shutil.rmtree(folder / "onnxruntime")

    for found, before in zip(results(runner), expected, strict=True):
        np.testing.assert_array_equal(found, before)


@pytest.mark.parametrize("size", [0, 100])
def test_missing_weights_are_an_error_when_it_is_loaded(
    lowered: tuple[Path, list[ProgramEntry]], size: int
) -> None:
    folder, entries = lowered
    with (folder / "onnxruntime" / "weights.bin").open("r+b") as file:
        file.truncate(size)

    with pytest.raises(BundleError, match=r"beyond the end of weights\.bin"):
        loaded(folder, [entry for entry in entries if entry.spec.name == BATCH])


def test_an_empty_file_of_weights_is_an_error(
    lowered: tuple[Path, list[ProgramEntry]],
) -> None:
    folder, entries = lowered
    entry = next(entry for entry in entries if entry.spec.name == BATCH)
    path = folder / entry.files[0]
    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:
        for stored in tensor.external_data:
            if stored.key in ("offset", "length"):
                stored.value = "0"
    path.write_bytes(model.SerializeToString())
    (folder / "onnxruntime" / "weights.bin").write_bytes(b"")

    with pytest.raises(BundleError, match="cannot read the weights"):
        OwnWeights(OnnxGraph.of(folder, entry), entry.spec)


def test_another_signature_is_an_error_at_the_first_run(
    lowered: tuple[Path, list[ProgramEntry]],
) -> None:
    folder, entries = lowered
    step, batch = (
        folder / next(e for e in entries if e.spec.name == name).files[0]
        for name in ("step", BATCH)
    )
    shutil.copyfile(step, batch)
    runner = loaded(folder, entries)

    with pytest.raises(BundleError, match="signature"):
        results(runner)
