"""An encoder with a massive channel in static 8 bits: one output in another precision repairs it."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.network.whisper import build_model
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.spec import ProgramSpec
from whisperport.speech.audio import load_audio, log_mel
from whisperport.targets.tflite.lowering import lower_to_tflite
from whisperport.targets.tflite.quantization import LINEAR, MATMUL
from whisperport.targets.tflite.quantizing import quantize_statically
from whisperport.targets.tflite.runner import TfliteFile, TfliteRunner
from whisperport.verification.clips import shipped_audio
from whisperport.verification.loss import loss_of

from ...extent import core_or_all
from ...outlier_checkpoints import NAMES, STORED, outlier_checkpoint, planted_in
from ...shared_exports import run_folder

RUINED_DB, REPAIRED_DB = 12.0, 20.0


@pytest.fixture(scope="module", params=core_or_all(NAMES[-1:], NAMES))
def name(request: pytest.FixtureRequest) -> str:
    """A stored checkpoint with a massive channel."""
    return str(request.param)


@pytest.fixture(scope="module")
def mels() -> np.ndarray:
    """(3, 1, 80, 3000): two clips to calibrate with, and one to measure."""
    clips = [load_audio(clip.path) for clip in shipped_audio()[:3]]
    return np.stack([log_mel(clip, 80, n_frames=3000)[None] for clip in clips])


@pytest.fixture(scope="module")
def lowered(
    name: str, mels: np.ndarray, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, ProgramSpec, Mapping[str, Path]]:
    """Its encoder as a .tflite file in float32, and the calibration set."""
    folder = tmp_path_factory.mktemp("sensitive")
    checkpoint = load_checkpoint(outlier_checkpoint(name, run_folder(tmp_path_factory)))
    (encoder,) = whisper_programs(Parts(build_model(checkpoint), []), ["encoder"])
    lower_to_tflite(
        [encoder], folder / "encoder.tflite", lambda _: None, target="litert", extra="litert-export"
    )
    np.save(folder / "mel.npy", mels[:2])
    return folder / "encoder.tflite", encoder.spec, {"mel": folder / "mel.npy"}


def features(path: Path, spec: ProgramSpec, mel: np.ndarray) -> np.ndarray:
    runner = TfliteRunner(spec, TfliteFile(path, 1, extra="litert"))
    return np.array(runner.run({"mel": mel})["features"][0])


def test_naive_8_bits_ruin_it_and_the_planted_output_in_another_precision_repairs_it(
    name: str,
    lowered: tuple[Path, ProgramSpec, Mapping[str, Path]],
    mels: np.ndarray,
    tmp_path: Path,
) -> None:
    source, spec, arrays = lowered
    expected = features(source, spec, mels[2])
    planted = planted_in(STORED / f"{name}.xz")
    sqnr, sizes, notes = {}, {}, {}
    for other in ("", "w8", "w8a16", "fp32"):
        exceptions = dict.fromkeys(LINEAR, other) if other else {}
        path = tmp_path / f"{other}.tflite"
        path.write_bytes(source.read_bytes())
        notes[other] = quantize_statically(
            path,
            spec,
            "w8a8",
            arrays,
            sensitive_in=exceptions,
            target="litert",
            extra="litert-export",
        )
        sqnr[other] = loss_of(features(path, spec, mels[2]), expected).sqnr_db
        sizes[other] = path.stat().st_size

    assert sqnr.pop("") < RUINED_DB
    assert notes.pop("") == ()
    assert min(sqnr.values()) > REPAIRED_DB, sqnr
    assert sizes["w8"] < 1.01 * sizes[""]
    place = f"{planted.name.removeprefix('encoder.')}.mlp.2"
    for other, (note,) in notes.items():
        assert note.startswith(f"in {other} instead: {place}: channel {planted.channel} reaches ")


def test_attention_keeps_its_probabilities_in_float_and_the_scores_are_in_8_bits(
    lowered: tuple[Path, ProgramSpec, Mapping[str, Path]], mels: np.ndarray, tmp_path: Path
) -> None:
    source, spec, arrays = lowered
    expected = features(source, spec, mels[2])
    sqnr, notes = {}, {}
    for name, in_attention in (("float", {"BATCH_MATMUL": "fp32"}), ("8 bits", {})):
        path = tmp_path / f"{name}.tflite"
        path.write_bytes(source.read_bytes())
        notes[name] = quantize_statically(
            path,
            spec,
            "w8a8",
            arrays,
            operators=MATMUL,
            sensitive_in={**dict.fromkeys(LINEAR, "w8"), **in_attention},
            target="litert",
            extra="litert-export",
        )
        sqnr[name] = loss_of(features(path, spec, mels[2]), expected).sqnr_db

    exceptions = [note for note in notes["float"] if "attn" in note]
    assert sqnr["8 bits"] < RUINED_DB
    assert sqnr["float"] > REPAIRED_DB
    assert [note.split(": ")[1] for note in exceptions] == [
        f"blocks.{block}.attn, probabilities times values" for block in range(4)
    ]
