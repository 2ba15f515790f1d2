"""Rules WP601 and WP602 on decoders of other projects, as torch graphs and ONNX files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whisperport.model.inspection.graph import Graph
from whisperport.model.inspection.read import read_graphs
from whisperport.model.inspection.read_exported import read_exported
from whisperport.model.inspection.rules import RULES
from whisperport.program.spec import Limit

from ...embedded import default_bundle
from ...extent import EVERYTHING, core_or_all

LAYERS, WIDTH, AUDIO, TOKENS, VOCABULARY = 2, 16, 30, 8, 50
# A projection is 2 · T · d · d operations, and moves features, weight and result in float32.
GFLOP = 2 * AUDIO * WIDTH * WIDTH / 1e9
MEGABYTES = 4 * (2 * AUDIO * WIDTH + WIDTH * WIDTH) / 1e6


def found(graph: Graph) -> dict[str, list[str]]:
    """Rule -> the reasons of its findings."""
    return {
        code: [one.reason for one in RULES[code].check(graph, Limit(rule=code, source="a test"))]
        for code in ("WP601", "WP602")
    }


def exported(module: nn.Module, *inputs: Tensor) -> Any:
    with torch.no_grad():
        return torch.export.export(module.eval(), inputs, strict=False)


def as_torch(program: Any, folder: Path) -> Graph:
    return read_exported("decoder", program)


def as_onnx(program: Any, folder: Path) -> Graph:
    torch.onnx.export(program, f=folder / "decoder.onnx", dynamo=True, verbose=False)
    return read_graphs(folder / "decoder.onnx")[0]


FORMATS: dict[str, Callable[[Any, Path], Graph]] = {
    "torch": as_torch,
    "ONNX": as_onnx,
}
every_format = pytest.mark.parametrize("form", core_or_all(["torch"], [*FORMATS]))


@pytest.fixture(scope="module")
def openai_decoder() -> Any:
    """The decoder of openai-whisper: tokens and xa in, logits out."""
    from whisper.model import TextDecoder

    torch.manual_seed(0)
    decoder = TextDecoder(VOCABULARY, 2 * TOKENS, WIDTH, 2, LAYERS)
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    return exported(decoder, tokens, torch.zeros(1, AUDIO, WIDTH))


@pytest.fixture(scope="module")
def transformers_decoder() -> Any:
    """The decoder of transformers without a cache: all tokens at every call."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperDecoder

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        decoder_layers=LAYERS,
        decoder_attention_heads=2,
        decoder_ffn_dim=2 * WIDTH,
        max_target_positions=2 * TOKENS,
        pad_token_id=0,
    )

    class Uncached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = WhisperDecoder(config)

        def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
            result = self.decoder(tokens, encoder_hidden_states=features, use_cache=False)
            return result.last_hidden_state @ self.decoder.embed_tokens.weight.T

    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    return exported(Uncached(), tokens, torch.zeros(1, AUDIO, WIDTH))


class CachedCrossAttention(nn.Module):
    """A step as in NxDI before its pull request 70: keys and values are projected, then overwritten."""

    def __init__(self, *, overwritten: bool) -> None:
        super().__init__()
        self.overwritten = overwritten
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, xa: Tensor, cache_k: Tensor, cache_v: Tensor) -> Tensor:
        k, v = self.key(xa), self.value(xa)
        if self.overwritten:
            k, v = cache_k, cache_v
        scores = torch.softmax(self.query(x) @ k.mT, dim=-1)
        return self.out(scores @ v)


def step(*, overwritten: bool) -> Any:
    caches = [torch.zeros(1, AUDIO, WIDTH) for _ in range(2)]
    audio = torch.zeros(1, AUDIO, WIDTH)
    return exported(
        CachedCrossAttention(overwritten=overwritten), torch.zeros(1, 1, WIDTH), audio, *caches
    )


def check_every_layer(reasons: Mapping[str, list[str]]) -> None:
    """Two projections per layer are found, with the cost of each and of all."""
    assert len(reasons["WP601"]) == 2 * LAYERS
    assert reasons["WP602"] == []
    total = f"{2 * LAYERS * GFLOP:.3g} GFLOP"
    for reason in reasons["WP601"]:
        assert f"{GFLOP:.2g} GFLOP" in reason
        assert f"all {2 * LAYERS} of `" in reason
        assert total in reason


@every_format
def test_the_decoder_of_openai_whisper_projects_audio_for_every_token(
    openai_decoder: Any, tmp_path: Path, form: str
) -> None:
    reasons = found(FORMATS[form](openai_decoder, tmp_path))

    check_every_layer(reasons)
    assert f"{MEGABYTES:.3g} MB per token" in reasons["WP601"][0]


@pytest.mark.skipif(not EVERYTHING, reason="make test-all: as the decoder of openai-whisper")
@every_format
def test_the_decoder_of_transformers_without_cache_projects_audio_for_every_token(
    transformers_decoder: Any, tmp_path: Path, form: str
) -> None:
    check_every_layer(found(FORMATS[form](transformers_decoder, tmp_path)))


@every_format
def test_a_projection_that_is_overwritten_is_no_longer_in_the_program(
    tmp_path: Path, form: str
) -> None:
    """What remains is its input, which nothing reads."""
    read = FORMATS[form]

    overwritten = found(read(step(overwritten=True), tmp_path))
    used = found(read(step(overwritten=False), tmp_path))

    assert overwritten["WP601"] == []
    (reason,) = overwritten["WP602"]
    assert reason.startswith(f"input of shape (1, {AUDIO}, {WIDTH})")
    assert len(used["WP601"]) == 2
    assert len(used["WP602"]) == 2  # the caches


def test_our_decode_programs_project_no_audio_and_use_every_input(
    micro_programs: tuple[Any, ...], tmp_path: Path
) -> None:
    clean: dict[str, list[str]] = {"WP601": [], "WP602": []}
    programs = {program.name: program for program in micro_programs}

    for name in ("step", "prefill_4", "align"):
        assert found(as_torch(programs[name].exported, tmp_path)) == clean
    bundle = default_bundle() / "onnxruntime"
    assert found(read_graphs(bundle / "step.onnx")[0]) == clean


def test_the_programs_of_a_window_are_no_decoders(
    micro_programs: tuple[Any, ...], tmp_path: Path
) -> None:
    """The encoder and cross_kv read audio, and run once per window."""
    programs = {program.name: program for program in micro_programs}

    for name in ("encoder", "cross_kv"):
        assert found(as_torch(programs[name].exported, tmp_path))["WP601"] == []
