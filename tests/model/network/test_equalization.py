"""Equalized channels: the same numbers from an encoder whose channels have ranges that are more alike."""

import copy
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from whisperport.model.network.encoder import Encoder, EncoderBlock
from whisperport.model.network.equalization import equalize

from ...published_dims import whisper_dims

DIMS = replace(whisper_dims(48, layers=2, heads=3), n_audio_ctx=12)
CHANNEL, FACTOR = 5, 40.0


@pytest.fixture
def encoder() -> Encoder:
    """An encoder of random weights, in which a channel of each activation is 40 times as large."""
    torch.manual_seed(0)
    encoder = Encoder(DIMS).eval().requires_grad_(False)
    encoder.positional_embedding.normal_()
    for module in encoder.blocks:
        block = cast(EncoderBlock, module)
        for norm in (block.attn_ln, block.mlp_ln):
            norm.weight.uniform_(0.5, 2)
            norm.bias.normal_()
            norm.weight[CHANNEL] *= FACTOR
        for linear in (block.attn.query, block.attn.value):
            linear.weight[CHANNEL] *= FACTOR
    return encoder


def activations(encoder: Encoder, mel: Tensor) -> dict[str, Tensor]:
    """Return the largest absolute value of each channel, by module."""
    found: dict[str, Tensor] = {}

    def keep(name: str, output: Any) -> None:
        found[name] = output[0].abs().amax(0)

    for name, module in encoder.named_modules():
        if name.endswith(("_ln", "query", "key", "value")):
            module.register_forward_hook(lambda _m, _i, out, name=name: keep(name, out))
    encoder(mel)
    return found


def test_every_number_stays_the_same(encoder: Encoder) -> None:
    equalized = copy.deepcopy(encoder)
    mel = torch.randn(1, 80, 24)

    equalize(equalized)

    assert torch.equal(encoder(mel), equalized(mel))
    changed = [
        name
        for (name, one), other in zip(
            encoder.named_parameters(), equalized.parameters(), strict=True
        )
        if not torch.equal(one, other)
    ]
    assert len(changed) == 11 * DIMS.n_audio_layer


def test_a_channel_that_is_out_of_scale_comes_closer_to_the_others(encoder: Encoder) -> None:
    mel = torch.randn(1, 80, 24)
    before = activations(copy.deepcopy(encoder), mel)

    equalize(encoder)

    after = activations(encoder, mel)
    for name in ("attn_ln", "mlp_ln", "attn.query", "attn.value"):
        ratios = [
            float(found[f"blocks.0.{name}"][CHANNEL] / found[f"blocks.0.{name}"].median())
            for found in (before, after)
        ]
        assert ratios[1] < 0.5 * ratios[0], name


def test_a_channel_without_weights_is_left_alone(encoder: Encoder) -> None:
    attention = cast(EncoderBlock, encoder.blocks[0]).attn
    attention.value.weight[CHANNEL] = 0
    attention.value.bias[CHANNEL] = 0
    attention.out.weight[:, CHANNEL] = 0
    mel = torch.randn(1, 80, 24)
    expected = encoder(mel)

    equalize(encoder)

    assert torch.equal(encoder(mel), expected)
    assert all(parameter.isfinite().all() for parameter in encoder.parameters())
