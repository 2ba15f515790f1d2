"""The stored outlier checkpoints: what their recipe made, words kept, static int8 lost and repaired."""

import json
from pathlib import Path

import pytest
import torch
from tests.outlier_checkpoints import NAMES, STORED, Planted, digest, outlier_checkpoint, planted_in
from tests.shared_exports import run_folder
from tests.static_rounding import Rounding
from torch import Tensor

from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.network.whisper import Whisper, build_model
from whisperport.speech.audio import load_audio, log_mel
from whisperport.speech.text import Tokenizer
from whisperport.verification import text_errors
from whisperport.verification.clips import shipped_audio

PROMPT = [50258, 50259, 50359, 50363]  # English, transcribe, no timestamps
END = 50257
CLIPS = [clip for clip in shipped_audio() if clip.path.stem in ("03-slt", "16-awb")]
LOST_DB = 6.0


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """A stored checkpoint."""
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder, shared with the other workers."""
    return outlier_checkpoint(name, run_folder(tmp_path_factory))


@pytest.fixture(scope="module")
def planted(name: str) -> Planted:
    """Where its outlier sits."""
    return planted_in(STORED / f"{name}.xz")


@pytest.fixture(scope="module")
def mels() -> list[Tensor]:
    """Two shipped clips, (1, 80, 3000) each."""
    return [torch.from_numpy(log_mel(load_audio(c.path), 80, n_frames=3000))[None] for c in CLIPS]


def test_there_are_two() -> None:
    assert len(NAMES) >= 2


def test_it_is_the_stored_one_bit_for_bit(name: str, folder: Path) -> None:
    stored: dict[str, str] = json.loads((STORED / "digests.json").read_text())

    assert digest(load_checkpoint(folder).weights) == stored[name]


def test_its_words_are_kept(folder: Path, mels: list[Tensor]) -> None:
    checkpoint = load_checkpoint(folder)
    model = build_model(checkpoint)
    tokenizer = Tokenizer.from_json(checkpoint.tokenizer_json, checkpoint.generation)

    errors = [
        text_errors(tokenizer.decode(_greedy(model, model.encode(mel))), clip.text)
        for mel, clip in zip(mels, CLIPS, strict=True)
    ]

    assert sum(e.substitutions + e.deletions + e.insertions for e in errors) <= 1, errors


@torch.no_grad()
def test_the_channel_is_massive(folder: Path, planted: Planted, mels: list[Tensor]) -> None:
    model = build_model(load_checkpoint(folder))
    behind: list[Tensor] = []
    model.get_submodule(planted.name).register_forward_hook(lambda _m, _x, y: behind.append(y))
    model.encode(mels[0])
    x = behind[0][0]
    frames = list(planted.frames) or list(range(x.shape[0]))

    channel, others = (
        x[:, planted.channel],
        torch.cat([x[:, : planted.channel], x[:, planted.channel + 1 :]], 1),
    )

    assert channel[frames].median() == pytest.approx(planted.value, rel=0.2)
    assert (x.max() - x.min()) / others.square().mean().sqrt() > 300


@torch.no_grad()
def test_static_int8_loses_and_two_tensors_repair_it(
    folder: Path, planted: Planted, mels: list[Tensor]
) -> None:
    checkpoint, block = load_checkpoint(folder), planted.name.removeprefix("encoder.")
    later = tuple(f"blocks.{i}" for i in range(int(block.split(".")[1]), 4))

    lost = _sqnr(build_model(checkpoint), (), mels)
    repaired = _sqnr(build_model(checkpoint), (f"{block}.mlp.2", *later), mels)

    assert lost < LOST_DB
    assert repaired > lost + 5


def _sqnr(model: Whisper, kept: tuple[str, ...], mels: list[Tensor]) -> float:
    """SQNR in dB of the encoder in simulated static int8; the ranges are those of the same clip."""
    exact, rounding = model.encode(mels[0]), Rounding(model.encoder, kept=kept)
    model.encode(mels[0])
    rounding.recording = False
    noise = model.encode(mels[0]) - exact
    return float(10 * torch.log10(exact.square().mean() / noise.square().mean()))


def _greedy(model: Whisper, features: Tensor) -> list[int]:
    """The text tokens of one clip."""
    cross_kv, tokens = model.cross_kv(features), list(PROMPT)
    while tokens[-1] != END and len(tokens) < 60:
        with torch.no_grad():
            row = model.logits(torch.tensor(tokens), cross_kv, first=len(tokens) - 1)[-1]
        tokens.append(int(row.argmax()))
    return [t for t in tokens[len(PROMPT) :] if t < END]
