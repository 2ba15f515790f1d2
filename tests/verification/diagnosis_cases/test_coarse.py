"""Encoders in 8 bits, also of checkpoints with massive activations: quantization is named at any SQNR.

The devices are simulated by `in_eight_bits`, which shares no code with the package, and by programs that
ONNX Runtime quantized. Their windows have 8 s and the last position embeddings, so that the massive frames
at the end are among them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnxruntime import InferenceSession
from onnxruntime.quantization import CalibrationDataReader, quantize_static

from whisperport.model.checkpoint import Checkpoint, load_checkpoint
from whisperport.model.network.static_int8 import RECIPES, StaticInt8Encoder
from whisperport.model.network.whisper import build_model
from whisperport.model.trace.onnx_file import write_onnx_file
from whisperport.model.trace.program import trace
from whisperport.speech.audio import load_audio, log_mel
from whisperport.verification.clips import shipped_audio
from whisperport.verification.diagnosis.causes import CauseCode
from whisperport.verification.diagnosis.diagnosing import DiagnoseOptions, diagnose
from whisperport.verification.diagnosis.expected import (
    Alternative,
    Expected,
    ExpectedTensor,
    Quantization,
    Simulations,
)
from whisperport.verification.diagnosis.expected_outputs import expected_outputs
from whisperport.verification.diagnosis.result import Diagnosis

from ...embedded import default_bundle
from ...extent import core_or_all
from ...outlier_checkpoints import NAMES, in_eight_bits, outlier_checkpoint
from ...shared_exports import run_folder

POSITIONS = 400
KINDS = ("min-max", "percentile", "per-channel weights", "w8a16", "onnxruntime")
MISTAKES = ("none", "scale", "transposed", "input", "clip", "int8", "channels")
CORE = (  # of all pairs
    ("min-max", "none"),
    ("min-max", "transposed"),
    ("percentile", "scale"),
    ("w8a16", "clip"),
    ("onnxruntime", "none"),
    ("onnxruntime", "input"),
    ("onnxruntime", "channels"),
    ("onnxruntime", "int8"),
)
PASSED_DB = 35.0
_C = CauseCode
Mels = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Encoders:
    """What an encoder computes for each input: exact, quantized by each kind, and simulated.

    A quantized or simulated encoder runs when its output is first asked for.
    """

    exact: Mels
    quantized: Callable[[str, str], Any]  # kind, input
    simulated: Callable[[str, str], Any]  # input, recipe

    def expected(self, *, has_simulation: bool = True) -> Expected:
        """The expected outputs for the first clip."""

        def simulate(name: str, recipes: Sequence[str]) -> Simulations:
            known = [r for r in RECIPES if has_simulation and r in (recipes or RECIPES)]
            return {r: {"features": self.simulated(name, r)} for r in known}

        causes = {"clip": _C.OTHER_CLIP, "other clip": _C.OTHER_CLIP, "input": _C.AUDIO_NOT_SCALED}
        others = [
            Alternative(cause, name, {"features": self.exact[name]}, "", partial(simulate, name))
            for name, cause in causes.items()
        ]
        tensor = ExpectedTensor("features", self.exact["none"], 1)
        return Expected(
            "encoder",
            "clip",
            (tensor,),
            make_alternatives=lambda: others,
            simulate=partial(simulate, "none"),
        )


@cache
def _mels() -> Mels:
    def mel(audio: Any) -> Any:
        return torch.from_numpy(log_mel(audio, 80, n_frames=2 * POSITIONS))[None]

    first, second, third = (load_audio(clip.path) for clip in shipped_audio()[:3])
    return {
        "none": mel(first),
        "clip": mel(second),
        "other clip": mel(third),
        "input": mel(32768 * first),
    }


@pytest.fixture(scope="module", params=core_or_all(NAMES[-1:], ("default", *NAMES)))
def encoders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Encoders:
    """The embedded model, and the checkpoints with massive activations."""
    name = request.param
    source = name if name == "default" else outlier_checkpoint(name, run_folder(tmp_path_factory))
    return _encoders(load_checkpoint(source), tmp_path_factory.mktemp("onnx"))


def _encoder(checkpoint: Checkpoint) -> Any:
    """The encoder with the last positions of its window."""
    encoder = build_model(checkpoint).encoder
    last = encoder.positional_embedding[-POSITIONS:].detach()
    encoder.positional_embedding = torch.nn.Parameter(last, requires_grad=False)
    return encoder


def _of_onnxruntime(encoder: Any, calibration: list[Any], folder: Path) -> Any:
    """The encoder that ONNX Runtime quantizes: every operator, ranges to the largest value."""
    samples = iter([{"mel": mel.numpy()} for mel in calibration])
    reader = type("Reader", (CalibrationDataReader,), {"get_next": lambda _: next(samples, None)})
    program = trace("encoder", encoder, (calibration[0],), ["features"])
    write_onnx_file(program, folder / "encoder.onnx")
    quantize_static(folder / "encoder.onnx", folder / "quantized.onnx", reader())
    session = InferenceSession(folder / "quantized.onnx")
    return lambda mel: torch.from_numpy(session.run(None, {"mel": mel.numpy()})[0])


def _encoders(checkpoint: Checkpoint, folder: Path) -> Encoders:
    mels = _mels()
    calibration = [mels["none"], mels["clip"]]

    @cache
    def encoder(kind: str) -> Any:
        if kind == KINDS[-1]:
            return _of_onnxruntime(_encoder(checkpoint), calibration, folder)
        return in_eight_bits(_encoder(checkpoint), calibration, kind)

    @cache
    def simulation() -> StaticInt8Encoder:
        return StaticInt8Encoder(_encoder(checkpoint), [*mels.values()][:3])

    @cache
    @torch.no_grad()
    def quantized(kind: str, name: str) -> Any:
        return encoder(kind)(mels[name]).numpy()

    @cache
    def simulated(name: str, recipe: str) -> Any:
        return simulation().encode(mels[name], recipe).numpy()

    exact = _encoder(checkpoint)
    with torch.no_grad():
        return Encoders(
            {name: exact(mel).numpy() for name, mel in mels.items()}, quantized, simulated
        )


def _file(features: Any, mistake: str) -> Any:
    if mistake == "int8":
        scale = np.abs(features).max() / 127
        return np.rint(features / scale).astype(np.int8)
    changed = {
        "scale": 2 * features,
        "transposed": features.swapaxes(1, 2),
        "channels": np.roll(features, 20, axis=2),
    }.get(mistake, features)
    return np.ascontiguousarray(changed)


def _causes(encoders: Encoders, kind: str, mistake: str) -> set[CauseCode]:
    """The causes that a file of a device has."""
    given = mistake if mistake in encoders.exact else "none"
    x, y = encoders.exact[given], encoders.quantized(kind, given)
    sqnr = 10 * np.log10(np.square(x).sum() / np.square(x - y).sum())
    other = {
        "scale": _C.WRONG_SCALE,
        "transposed": _C.AXES_PERMUTED,
        "input": _C.AUDIO_NOT_SCALED,
        "clip": _C.OTHER_CLIP,
        "int8": _C.INTEGERS_READ_AS_FLOATS,
        "channels": _C.CHANNEL_BLOCKS_REORDERED,
    }
    limit = PASSED_DB
    if mistake == "int8":  # a file's rounding explains an error up to three times its own
        limit = 10 * np.log10(np.square(y).mean() * 4 / (np.abs(y).max() / 127) ** 2)
    is_coarse = sqnr < limit
    return ({_C.QUANTIZATION_ERROR} if is_coarse else set()) | {
        other[m] for m in (mistake,) if m in other
    }


def _diagnosis(expected: Expected, values: Any, folder: Path) -> Diagnosis:
    path = folder / "output.bin"
    values.tofile(path)
    return diagnose(expected, path)


def test_the_causes_of_files_of_8_bit_encoders_are_named(
    encoders: Encoders, tmp_path: Path
) -> None:
    # given each quantization, with one of the mistakes on top of it
    every = [(kind, mistake) for kind in KINDS for mistake in MISTAKES]
    cases = core_or_all(CORE, every)
    # when the files are diagnosed
    named = {
        case: set(
            _diagnosis(
                encoders.expected(), _file(encoders.quantized(case[0], given), case[1]), tmp_path
            ).causes
        )
        for case in cases
        for given in [case[1] if case[1] in encoders.exact else "none"]
    }
    # then the causes are those of the mistake and of the quantization
    assert named == {case: _causes(encoders, *case) for case in cases}


def test_the_output_of_the_known_8_bit_program_is_recognized_in_another_layout(
    encoders: Encoders, tmp_path: Path
) -> None:
    # given a transposed file with another scale, and the same program's output on this machine
    features = encoders.quantized("onnxruntime", "none")
    path = tmp_path / "output.bin"
    np.ascontiguousarray(3 * features.swapaxes(1, 2)).tofile(path)
    # when
    found = diagnose(encoders.expected(), path, DiagnoseOptions(simulated=features))
    # then
    layout = {_C.WRONG_SCALE, _C.AXES_PERMUTED}
    assert set(found.causes) == layout | _causes(encoders, "onnxruntime", "none")
    np.testing.assert_allclose(found.outputs[0].corrected, features, rtol=1e-3, atol=1e-3)
    assert found.numbers["device_against_simulated_sqnr_db"] > 80


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_coarse_quantization_is_named_without_a_simulation(
    encoders: Encoders, kind: str, tmp_path: Path
) -> None:
    found = _diagnosis(
        encoders.expected(has_simulation=False), encoders.quantized(kind, "none"), tmp_path
    )

    assert set(found.causes) == _causes(encoders, kind, "none")


def test_an_unknown_clip_is_no_quantization(encoders: Encoders, tmp_path: Path) -> None:
    # given the exact output for a clip that the diagnosis does not know
    expected = encoders.expected()
    known = [a for a in expected.alternatives if a.sentence != "other clip"]
    # when
    found = _diagnosis(
        replace(expected, make_alternatives=lambda: known), encoders.exact["other clip"], tmp_path
    )
    # then
    assert found.causes == ()


def test_declared_integers_of_a_coarse_quantization_are_read_and_named(
    encoders: Encoders, tmp_path: Path
) -> None:
    # given a file in int8, whose scale and zero point are known
    features = encoders.quantized("min-max", "none")
    stored = Quantization("int8", float(np.abs(features).max() / 127), 0)
    expected = encoders.expected()
    declared = replace(expected.tensors[0], quantization=stored)
    # when
    found = _diagnosis(replace(expected, tensors=(declared,)), stored.quantize(features), tmp_path)
    # then
    assert set(found.causes) == _causes(encoders, "min-max", "none")


def test_the_static_encoder_of_a_bundle_is_simulated_if_its_checkpoint_is_here() -> None:
    # given the embedded model's bundle
    expected = expected_outputs(default_bundle())
    # when
    simulated = expected.simulate(())
    # then
    right = expected.tensors[0].array
    errors = {
        recipe: np.square(x["features"] - right).sum() / np.square(right).sum()
        for recipe, x in simulated.items()
    }
    assert all(1e-5 < error < 0.3 for error in errors.values())
    assert list(errors) == list(RECIPES)
