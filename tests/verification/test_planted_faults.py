"""Sound encoders in six precisions are accepted, planted faults in each of them are refused.

The outputs are torch's, so that this takes seconds: in the precision itself, or with activations rounded as
compilers round them. The checkpoints are the embedded model and those with massive activations.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.network.lower_precision import lower_precision
from whisperport.model.network.whisper import Whisper, build_model
from whisperport.model.rewrites import run_rewrites
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.placement import Placement
from whisperport.program.runner import Runner
from whisperport.speech.audio import log_mel
from whisperport.targets import RunOptions, get_target
from whisperport.verification.array_checks import compare_features
from whisperport.verification.array_comparison import mistaken_for
from whisperport.verification.clips import shipped_clips
from whisperport.verification.eager import run_eager
from whisperport.verification.reference import Reference

from ..extent import EVERYTHING, core_or_all
from ..outlier_checkpoints import NAMES, outlier_checkpoint
from ..shared_exports import run_folder

Features = np.ndarray
CLIPS = core_or_all(2, 3)
# The last ones of the window: the massive frames are among them. In half precision, torch's products of all
# 1,500 take 2.5 s of CPU time for each clip.
POSITIONS = core_or_all(400, 1500)
# Of two floating-point formats of 16 bits, and of 16 and 8 bits, the coarser one is in the core.
PRECISIONS = core_or_all(
    ("fp32", "bf16", "w8", "w8a8"), ("fp32", "fp16", "bf16", "w8", "w8a16", "w8a8")
)
# Static w8a8 is not here: these compilers make an encoder with massive activations unsound in it.
COMPILED = (
    ("onnxruntime", "fp32"),
    ("onnxruntime", "w8"),
    ("openvino", "fp16"),
    ("openvino", "bf16"),
    ("openvino", "w8"),
    ("litert", "w8"),
    ("litert", "w8a16"),
)
EMBEDDED = "embedded"
CHECKPOINTS = core_or_all(NAMES[-1:], (EMBEDDED, *NAMES))


@dataclass(frozen=True)
class Made:
    """A checkpoint, its reference and its encoder's outputs."""

    model: Whisper
    reference: Reference
    sound: dict[str, list[Features]]  # precision -> features of each clip
    silence: Features


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    @cache
    def make(name: str) -> Made:
        folder = run_folder(tmp_path_factory)
        path = "default" if name == EMBEDDED else outlier_checkpoint(name, folder)
        checkpoint = load_checkpoint(path)
        model = build_model(checkpoint)
        model.dims = replace(model.dims, n_audio_ctx=POSITIONS)
        last = model.encoder.positional_embedding[-POSITIONS:].detach()
        model.encoder.positional_embedding = nn.Parameter(last, requires_grad=False)
        clips = shipped_clips(CLIPS)
        reference = run_eager(
            model, checkpoint.generation, clips, precisions=("fp16", "bf16", "w8")
        )
        audio = [clip.audio for clip in reference.clips]
        sound = {p: [encoded(model, one, p) for one in audio] for p in PRECISIONS}
        kept = [  # a reference stores the features of its first clips only
            clip if clip.features.size else replace(clip, features=features)
            for clip, features in zip(reference.clips, sound["fp32"], strict=True)
        ]
        reference = replace(reference, clips=tuple(kept))
        return Made(model, reference, sound, encoded(model, np.zeros(1600, np.float32), "fp32"))

    return make


def encoded(model: Whisper, audio: np.ndarray, precision: str) -> Features:
    """What the encoder computes in a precision.

    "w8a8" rounds the inputs of linears, as repaired recipes do; sums and outputs of linears stay precise.
    """
    mel = mel_of(model, audio)
    if precision == "fp32":
        return model.encode(mel)[0].numpy()
    bits = {"w8a16": 16, "w8a8": 8}.get(precision)
    torch_precision = "w8" if bits else precision
    with lower_precision(model, torch_precision) as dtype, rounded_inputs(model, bits):
        return model.encode(mel.to(dtype))[0].float().numpy()


def mel_of(model: Whisper, audio: np.ndarray) -> Tensor:
    """The input of the encoder, (1, n_mels, 2T)."""
    dims = model.dims
    return torch.from_numpy(log_mel(audio, dims.n_mels, n_frames=dims.n_frames))[None]


@contextmanager
def rounded_inputs(model: Whisper, bits: int | None) -> Iterator[None]:
    """Round what goes into linears and convolutions to 2^bits levels between its minimum and maximum."""

    def rounded(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        low, high = inputs[0].min(), inputs[0].max()
        step = (high - low) / (2**bits - 1)
        return (((inputs[0] - low) / step).round() * step + low,)

    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d)] if bits else []
    hooks = [layer.register_forward_pre_hook(rounded) for layer in layers]
    yield
    for hook in hooks:
        hook.remove()


def rolled(rows: int) -> Callable[[Features, Made], Features]:
    return lambda features, _: np.roll(features, rows, axis=0)


def holed(value: float) -> Callable[[Features, Made], Features]:
    def change(features: Features, _: Made) -> Features:
        features = features.copy()
        features[POSITIONS // 2, 5] = value
        return features

    return change


FAULTS: dict[str, Callable[[Features, Made], Features]] = {
    "NaN": holed(np.nan),
    "infinity": holed(np.inf),
    "zeros": lambda features, _: np.zeros_like(features),
    "transposed": lambda features, _: features.T.reshape(features.shape).copy(),
    "a frame late": rolled(1),
    "a frame early": rolled(-1),
    "three frames late": rolled(3),
    "fifty frames late": rolled(50),
    "silence": lambda _, made: made.silence,
    "permuted channels": lambda features, _: features[:, ::-1].copy(),
    "channels rolled by one": lambda features, _: np.roll(features, 1, axis=1),
    "frames in reverse": lambda features, _: features[::-1].copy(),
    "twice as large": lambda features, _: 2 * features,
    "a dead second": lambda features, _: np.where(
        (np.arange(len(features)) // 50 == 1)[:, None], -features, features
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_sound_programs_are_accepted_and_planted_faults_refused(
    made: Callable[[str], Made], name: str
) -> None:
    """In each precision, a sound output of each clip and 15 faults."""
    checkpoint = made(name)
    for precision in PRECISIONS:
        judge(checkpoint, precision, checkpoint.sound[precision])


def judge(checkpoint: Made, precision: str, sound: list[Features]) -> None:
    """Sound outputs are accepted, one per clip, and every fault planted in the first is not."""
    reference = checkpoint.reference
    for features, clip in zip(sound, reference.clips, strict=True):
        found = compare_features(features, clip, reference, precision)
        assert found, (precision, found.reason)
    first = reference.clips[0]
    wrong = {what: change(sound[0], checkpoint) for what, change in FAULTS.items()}
    for what, features in {**wrong, "another clip": sound[1]}.items():
        found = compare_features(features, first, reference, precision)
        assert not found, (precision, what, found.numbers())


@pytest.mark.slow
@pytest.mark.skipif(not EVERYTHING, reason="lowers an encoder for each runtime")
@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize(("target", "precision"), COMPILED)
def test_compiled_programs_are_judged_in_the_same_way(
    made: Callable[[str], Made], target: str, precision: str, name: str, tmp_path: Path
) -> None:
    """The encoder on the runtime itself: a sound output of each clip and 15 faults."""
    checkpoint = made(name)
    encoder = compiled_encoder(checkpoint, target, precision, tmp_path)
    mels = [mel_of(checkpoint.model, clip.audio).numpy() for clip in checkpoint.reference.clips]

    judge(checkpoint, precision, [encoder.run({"mel": mel})["features"][0] for mel in mels])


def compiled_encoder(checkpoint: Made, target: str, precision: str, folder: Path) -> Runner:
    """The encoder, lowered for a target in a precision, and calibrated with the clips if it needs it."""
    chosen = get_target(target).with_precisions({"encoder": precision})
    (program,) = whisper_programs(
        Parts(checkpoint.model, [(0, 0)]), ["encoder"], chosen.spec.lowering.variants
    )
    program, _ = run_rewrites(program, chosen.spec.lowering.rewrites)
    (entry,) = chosen.lower([program], folder)
    entry = replace(entry, placement=Placement(target, precision))
    if chosen.calibration(entry.spec, precision):
        mels = [mel_of(checkpoint.model, clip.audio) for clip in checkpoint.reference.clips]
        np.save(folder / "mel.npy", torch.stack(mels).numpy())
        entry = chosen.quantize(entry, folder, {"mel": folder / "mel.npy"})
    return chosen.load(folder, [entry], RunOptions(threads=1))["encoder"]


def test_torch_in_each_precision_passes_the_limit_that_it_sets(
    made: Callable[[str], Made],
) -> None:
    for name in CHECKPOINTS:
        reference = made(name).reference
        for precision in ("fp16", "bf16", "w8"):
            own = reference.loss(precision, "features")
            assert own is not None
            assert own.sqnr_db > 20
            assert own.median < own.p99 < own.p999 < own.largest


def test_the_model_is_unchanged_by_a_lower_precision() -> None:
    model = build_model(load_checkpoint("default"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    with pytest.raises(RuntimeError), lower_precision(model, "fp16"):
        model.encode(torch.zeros(1, 7, 3))

    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, before[name]), name


@settings(max_examples=40)
@given(
    shift=st.sampled_from([-4, -3, -2, -1, 1, 2, 3, 4]),
    noise=st.floats(0, 0.3),
    value=st.floats(0, 1e4),
    seed=st.integers(0, 999),
)
def test_a_shift_is_found_whatever_the_noise_and_the_massive_activations_are(
    shift: int, noise: float, value: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    expected = np.cumsum(random.standard_normal((200, 32)), axis=0) / 4  # neighbours resemble
    expected -= expected.mean(axis=0)
    expected[-5:, 7] += value
    sound = expected + noise * random.standard_normal(expected.shape)

    assert mistaken_for(sound, expected, {}, 150) == ""
    assert "rows" in mistaken_for(np.roll(sound, shift, axis=0), expected, {}, 150)
