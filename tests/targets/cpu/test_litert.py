"""The target `litert`: its files, what XNNPACK runs of them, and quantization during an export."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whisperport
from whisperport.build.calibration import CalibrationOptions
from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.build.export.placing import Placed
from whisperport.build.export.quantizing import quantize_programs
from whisperport.errors import VerificationError
from whisperport.model.inspection.read_tflite import read_tflite
from whisperport.model.inspection.tflite_signatures import copy_of_program, read_signatures
from whisperport.model.trace.program import Program, trace
from whisperport.program.bundle import Bundle, ProgramEntry
from whisperport.program.placement import Placement
from whisperport.targets import RunOptions, get_target
from whisperport.targets.cpu.litert import LiteRt, xnnpack_delegation
from whisperport.targets.tflite.lowering import lower_to_tflite
from whisperport.targets.tflite.runner import TfliteFile, TfliteRunner
from whisperport.verification.array_comparison import compare
from whisperport.verification.clips import shipped_clips
from whisperport.verification.recording import BundleSession
from whisperport.verification.tolerances import GATES

from ...extent import EVERYTHING

LITERT = get_target("litert")
ONE_THREAD = RunOptions(threads=1)


class Head(nn.Module):
    """A linear whose weight other programs share."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


@pytest.fixture(scope="module")
def three() -> list[Program]:
    """Two programs that share a weight, `step` the second of them; and one with a weight of its own."""
    torch.manual_seed(0)
    shared, own = nn.Linear(64, 64), nn.Linear(64, 64)
    modules = {"prefill": Head(shared), "own": Head(own), "step": Head(shared)}
    return [trace(name, module, (torch.randn(1, 64),), ["y"]) for name, module in modules.items()]


@pytest.fixture(scope="module")
def lowered(
    three: list[Program], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, ProgramEntry]]:
    """The folder and the entries of the three programs in float32; do not write to it."""
    folder = tmp_path_factory.mktemp("three")
    return folder, {entry.spec.name: entry for entry in LITERT.lower(three, folder)}


def test_programs_that_share_weights_share_a_file_in_which_step_is_first(
    lowered: tuple[Path, dict[str, ProgramEntry]],
) -> None:
    folder, entries = lowered

    files = {name: entry.files for name, entry in entries.items()}
    assert files["prefill"] == files["step"] != files["own"]
    signatures = read_signatures(folder / files["step"][0])
    assert {key: one.subgraph for key, one in signatures.items()} == {"step": 0, "prefill": 1}


def test_programs_of_different_precisions_have_different_files(
    three: list[Program], tmp_path: Path
) -> None:
    target = LITERT.with_precisions({"prefill": "w8", "own": "w8a8", "step": "fp32"})

    entries = {entry.spec.name: entry for entry in target.lower(three, tmp_path)}

    sizes = {n: (tmp_path / e.files[0]).stat().st_size for n, e in entries.items()}
    assert len({entry.files for entry in entries.values()}) == 3
    assert {name: entry.precision for name, entry in entries.items()} == target.precisions
    assert sizes["prefill"] < 0.6 * sizes["step"]
    assert sizes["own"] > 0.9 * sizes["step"]  # quantized after calibration


def test_the_nodes_of_every_program_are_listed_and_the_file_is_unchanged(
    lowered: tuple[Path, dict[str, ProgramEntry]],
) -> None:
    """Only the first program of a file can be listed, so the others are moved there for a moment."""
    folder, entries = lowered
    path = folder / entries["prefill"].files[0]
    before = path.read_bytes()

    found = {name: xnnpack_delegation(path, name) for name in read_signatures(path)}

    assert path.read_bytes() == before
    assert found["step"] == found["prefill"]
    assert found["step"] == {"delegated": 1, "subgraphs": 1, "undelegated": []}


def test_a_copy_for_the_profiler_runs_another_program_of_the_file(
    three: list[Program], tmp_path: Path
) -> None:
    path, copy = tmp_path / "two.tflite", tmp_path / "copy.tflite"
    twice = trace("twice", Head(nn.Linear(64, 8)), (torch.zeros(2, 64),), ["y"])
    lower_to_tflite([three[0], twice], path, target="litert", extra="litert-export")

    copy_of_program(path, 1, copy)

    assert read_signatures(copy) == {}
    (graph,) = read_tflite(copy)
    assert graph.inputs[0].shape == (2, 64)
    x = np.ones((2, 64), np.float32)
    found = TfliteRunner(twice.spec, TfliteFile(path, 1, extra="litert")).run({"x": x})
    interpreter = TfliteFile(copy, 1, extra="litert").interpreter
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], x)
    interpreter.invoke()
    alone = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    np.testing.assert_allclose(alone, found["y"], atol=1e-6)


def test_a_node_that_xnnpack_does_not_run_is_named(tmp_path: Path) -> None:
    class Cumulative(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cumsum(x, 1) + 1

    program = trace("sums", Cumulative(), (torch.zeros(1, 8),), ["y"])

    (entry,) = LITERT.lower([program], tmp_path)

    assert entry.facts.undelegated
    assert all(name.isupper() for name in entry.facts.undelegated)


def test_xnnpack_runs_every_node_of_the_built_in_programs(exported: Callable[..., Bundle]) -> None:
    bundle = exported("litert")

    for entry in bundle.manifest.programs:
        assert entry.facts.undelegated == (), entry.spec.name
        assert entry.facts.subgraphs == 1
    assert len({entry.files for entry in bundle.manifest.programs}) == 2


@pytest.fixture
def static(exported: Callable[..., Bundle], tmp_path: Path) -> tuple[Bundle, Placed]:
    """A copy of a bundle whose encoder is to be quantized to 8 bits."""
    bundle = exported("litert")
    folder = Path(shutil.copytree(bundle.folder, tmp_path / "bundle"))
    placements = {
        entry.spec.name: Placement(
            "litert", "w8a8" if entry.spec.name == "encoder" else "fp32", mask=entry.placement.mask
        )
        for entry in bundle.manifest.programs
    }
    entries = tuple(
        replace(entry, placement=placements[entry.spec.name]) for entry in bundle.manifest.programs
    )
    precisions = {name: one.precision for name, one in placements.items()}
    copy = Bundle(folder, replace(bundle.manifest, programs=entries))
    return copy, Placed(placements, {"litert": LiteRt().with_precisions(precisions)})


def test_a_static_program_is_quantized_with_the_shipped_audio_and_still_computes_its_outputs(
    static: tuple[Bundle, Placed],
) -> None:
    bundle, placed = static
    mel = np.random.default_rng(0).uniform(-1, 1, (1, 80, 200)).astype(np.float32)
    before = LITERT.load(bundle.folder, bundle.manifest.programs[:1], ONE_THREAD)
    expected = before["encoder"].run({"mel": mel})["features"]

    entries = quantize_programs(BundleSession(bundle, ONE_THREAD), placed, CalibrationOptions())

    names = [entry.spec.name for entry in entries]
    assert names == [entry.spec.name for entry in bundle.manifest.programs]
    assert entries[0].placement == placed.placements["encoder"]
    assert entries[1:] == bundle.manifest.programs[1:]
    assert sorted(p.name for p in bundle.folder.rglob("*") if p.name[0] == ".") == []
    found = LITERT.load(bundle.folder, entries[:1], ONE_THREAD)["encoder"].run({"mel": mel})
    compared = compare("features", found["features"], expected, GATES["w8a8"])
    assert compared, compared.reason
    assert not np.array_equal(found["features"], expected)


@pytest.mark.slow
@pytest.mark.skipif(not EVERYTHING, reason="exports the trained model four times")
@pytest.mark.parametrize(
    "options",
    [
        ExportOptions(precision="fp16"),
        ExportOptions(precision="w8"),
        ExportOptions(precisions={"encoder": "w8a8"}),
        ExportOptions(precisions={"encoder": "w8a16"}),
    ],
    ids=["fp16", "w8", "w8a8", "w8a16"],
)
def test_the_trained_model_is_quantized_and_verified(
    options: ExportOptions, tmp_path: Path
) -> None:
    how = replace(options, clips=shipped_clips()[:2], run=ONE_THREAD)

    bundle = export("default", "litert", tmp_path / "bundle", how)

    assert bundle.manifest.verification["passed"]


@pytest.mark.slow
@pytest.mark.skipif(not EVERYTHING, reason="exports the trained model")
def test_an_encoder_with_all_operators_in_8_bits_is_not_written_and_its_decibels_are_named(
    tmp_path: Path,
) -> None:
    # given: its words are right
    how = ExportOptions(
        precisions={"encoder": "w8a8"},
        options={"litert.static": "all"},
        clips=shipped_clips()[:2],
        run=ONE_THREAD,
    )

    with pytest.raises(VerificationError) as failed:
        export("default", "litert", tmp_path / "bundle", how)

    assert re.search(r"encoder.*SQNR \d\.\d dB is below 10 dB", failed.value.why)
    assert not (tmp_path / "bundle").exists()


ON_A_BOARD = """
import sys
for name in ("torch", "litert_torch", "ai_edge_quantizer", "tflite", "onnx"):
    sys.modules[name] = None
from whisperport.program.bundle import Bundle
from whisperport.runtime import Decoder, load_engine
from whisperport.targets import RunOptions
import numpy as np

bundle = Bundle.open(sys.argv[1])
engine = load_engine(bundle, RunOptions(threads=1))
dims = bundle.manifest.dims
features = engine.encode(np.zeros((dims.n_mels, dims.n_frames), np.float32))
decoder = Decoder(engine)
decoder.start_window(features)
decoder.prefill([engine.generation.start_of_transcript])
print(decoder.step(5).shape == (dims.n_vocab,), np.isfinite(decoder.step(5)).all())
"""


def test_a_board_needs_neither_torch_nor_a_converter(exported: Callable[..., Bundle]) -> None:
    command = [sys.executable, "-c", ON_A_BOARD, str(exported("litert").folder)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=240)

    assert done.stdout.strip() == "True True", done.stderr[-500:]
    assert done.stderr == ""


# `check --target litert` predicts what LiteRT's interpreter really gives to XNNPACK.


class Masked(nn.Module):
    """A mask of constants, which the converter stores as a SELECT_V2 of constants."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(8, 8, dtype=torch.bool).tril()
        return torch.softmax(x + torch.where(mask, 0.0, -1e4), -1)


class ComputedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.layer(x)[0])


class EverySecond(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)[:, :, ::2] * 2.0


class PaddedBy(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (1, 1), value=self.value) * 2.0


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(torch.relu(x) + 1.0)


@pytest.mark.parametrize(
    ("module", "undelegated"),
    [
        (Masked(), ["SELECT_V2"]),
        (ComputedWeight(), ["FULLY_CONNECTED"]),
        (EverySecond(), ["STRIDED_SLICE"]),
        (PaddedBy(0.0), []),
        (PaddedBy(-5.0), ["PADV2"]),
        (Logarithm(), []),
    ],
    ids=lambda one: type(one).__name__,
)
def test_predictions_are_what_the_interpreter_does(
    module: nn.Module, undelegated: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "program.tflite"
    program = trace("program", module, (torch.zeros(1, 8, 8),))
    lower_to_tflite([program], path, target="litert", extra="litert-export")

    (checked,) = whisperport.check(path, target="litert").programs

    real = xnnpack_delegation(path, "program")
    assert real["undelegated"] == undelegated
    names = {found.name for group in checked.rejected for found in group.occurrences}
    assert [n.original_op for n in checked.graph.nodes if n.name in names] == undelegated
    assert checked.predicted is not None
    assert len(checked.predicted.subgraphs) == real["subgraphs"]
