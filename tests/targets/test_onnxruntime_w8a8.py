"""The precision `w8a8` of the target `onnxruntime`, on an encoder with a massive channel."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.network.whisper import build_model
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.bundle import ProgramEntry
from whisperport.speech.audio import load_audio, log_mel
from whisperport.targets import RunOptions, get_target
from whisperport.targets.cpu.onnxruntime import LowerOptions
from whisperport.verification.clips import shipped_audio
from whisperport.verification.loss import loss_of

from ..outlier_checkpoints import NAMES, STORED, outlier_checkpoint, planted_in
from ..shared_exports import run_folder

NAME = NAMES[-1]  # of the stored checkpoint
RUINED_DB, REPAIRED_DB = 12.0, 20.0
BLOCKS = 4

Quantized = Callable[[LowerOptions | None, Path], ProgramEntry]


@pytest.fixture(scope="module")
def mels() -> np.ndarray:
    """(3, 1, 80, 3000): two clips to calibrate with, and one to measure."""
    clips = [load_audio(clip.path) for clip in shipped_audio()[:3]]
    return np.stack([log_mel(clip, 80, n_frames=3000)[None] for clip in clips])


@pytest.fixture(scope="module")
def quantized(mels: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """Lowers the encoder into a folder, and quantizes it with some options; None: it stays in float32."""
    checkpoint = load_checkpoint(outlier_checkpoint(NAME, run_folder(tmp_path_factory)))
    (encoder,) = whisper_programs(Parts(build_model(checkpoint), []), ["encoder"])
    samples = tmp_path_factory.mktemp("samples") / "mel.npy"
    np.save(samples, mels[:2])

    def make(options: LowerOptions | None, folder: Path) -> ProgramEntry:
        target = get_target("onnxruntime")
        if options is None:
            return target.lower([encoder], folder, lambda _: None)[0]
        target = target.configured(options).with_precisions({"encoder": "w8a8"})
        (entry,) = target.lower([encoder], folder, lambda _: None)
        assert target.calibration(encoder.spec, "w8a8") is not None
        return target.quantize(entry, folder, {"mel": samples}, lambda _: None)

    return make


def features(folder: Path, entry: ProgramEntry, mel: np.ndarray) -> np.ndarray:
    runner = get_target("onnxruntime").load(folder, [entry], RunOptions(threads=1))["encoder"]
    return np.array(runner.run({"mel": mel})["features"][0])


def test_naive_8_bits_ruin_it_and_exceptions_repair_it(
    quantized: Quantized, mels: np.ndarray, tmp_path: Path
) -> None:
    folders = {name: tmp_path / name for name in ("float", "naive", "repaired")}
    for folder in folders.values():
        folder.mkdir()
    naive = quantized(LowerOptions(sensitive="as-others"), folders["naive"])
    repaired = quantized(LowerOptions(), folders["repaired"])
    expected = features(folders["float"], quantized(None, folders["float"]), mels[2])

    sqnr = {
        entry: loss_of(features(folders[entry], made, mels[2]), expected).sqnr_db
        for entry, made in (("naive", naive), ("repaired", repaired))
    }

    assert sqnr["naive"] < RUINED_DB
    assert sqnr["repaired"] > REPAIRED_DB
    assert naive.facts.notes == ()
    planted = planted_in(STORED / f"{NAME}.xz")
    (note,) = [one for one in repaired.facts.notes if one.startswith("in w8 instead: ")]
    assert f"Gelu of {planted.name.removeprefix('encoder.')}.mlp.0: " in note
    in_float = [one for one in repaired.facts.notes if one.startswith("in fp32 instead: ")]
    assert 0 < len(in_float) <= BLOCKS
    assert all("Softmax of " in one for one in in_float)
    assert repaired.files == ("onnxruntime/encoder.onnx", "onnxruntime/encoder.bin")
    assert {file.name for file in (folders["repaired"] / "onnxruntime").iterdir()} == {
        *("encoder.bin", "encoder.onnx", "weights.bin")
    }
    model = onnx.load(str(folders["repaired"] / repaired.files[0]), load_external_data=False)
    matrices = [one for one in model.graph.initializer if len(one.dims) > 1]
    in_8_bits = [one for one in matrices if one.data_type == onnx.TensorProto.UINT8]
    assert len(in_8_bits) == 2 + 6 * BLOCKS  # two convolutions, and six linears in each block
    operators = _executed(folders["repaired"], repaired)
    assert operators["MatMulNBits"] == 1
    assert operators["FusedMatMul"] + operators["MatMul"] == len(
        in_float
    )  # probabilities times values
    assert operators["Gemm"] + operators["Conv"] == 0


def _executed(folder: Path, entry: ProgramEntry) -> Mapping[str, int]:
    """Return how often ONNX Runtime executes each operator, after its own changes of the graph."""
    settings = onnxruntime.SessionOptions()
    settings.optimized_model_filepath = str(folder / "executed.onnx")
    settings.log_severity_level = 3
    onnxruntime.InferenceSession(str(folder / entry.files[0]), settings)
    model = onnx.load(str(folder / "executed.onnx"), load_external_data=False)
    return Counter(node.op_type for node in model.graph.node)
