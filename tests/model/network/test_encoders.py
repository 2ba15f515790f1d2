"""Encoders of short windows and with equalized channels, compared with the model."""

import copy
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from whisperport.model.network.encoder import Encoder, EncoderBlock
from whisperport.model.network.equalization import equalize
from whisperport.model.network.short_window import PaddedCrossKV
from whisperport.model.network.whisper import build_model
from whisperport.program.window import PADDINGS, Window

from ...micro import whisper_dims

# Short windows in torch: each padding against its definition, written down in numpy.


# Float32 sums of some ten terms, in another order. Measured: 6e-7 at most.
ATOL = 1e-5


def heads_of(x: np.ndarray, linear: Any, n_head: int) -> np.ndarray:
    """Project (T, d) to (H, T, D)."""
    y = x @ linear.weight.numpy().T + (0 if linear.bias is None else linear.bias.numpy())
    return y.reshape(len(x), n_head, -1).transpose(1, 0, 2)


def by_definition(
    padding: str, q: np.ndarray, features: np.ndarray, silence: np.ndarray, n: int, attention: Any
) -> np.ndarray:
    """Cross-attention output of a query (H, D) over audio followed by n positions of padding: (H, D)."""
    rows = np.concatenate([features, silence]) if padding == "silence" else features
    scores = np.einsum("hd,htd->ht", q, heads_of(rows, attention.key, len(q)))
    weights, values = np.exp(scores), heads_of(rows, attention.value, len(q))
    taken = np.einsum("ht,htd->hd", weights, values)
    whole = weights.sum(1)
    if padding in ("features", "keys-and-values"):  # a key of zeros scores 0 with every query
        whole = whole + n
    if padding == "features":  # and zeros have the bias for a value
        taken = taken + n * attention.value.bias.numpy().reshape(len(q), -1)
    return taken / whole[:, None]


@settings(max_examples=40)
@given(
    padding=st.sampled_from(PADDINGS),
    positions=st.integers(1, 9),
    more=st.integers(1, 8),
    seed=st.integers(0, 10_000),
)
def test_attention_over_padded_keys_and_values_is_the_paddings_definition(
    micro_checkpoint: Any, padding: str, positions: int, more: int, seed: int
) -> None:
    context = positions if padding == "none" else min(10, positions + more)
    window = Window(
        positions=positions, audio_positions=positions, context_positions=context, padding=padding
    )
    model = build_model(micro_checkpoint, window)
    random = torch.Generator().manual_seed(seed)
    features = torch.randn(1, positions, 16, generator=random)
    q = torch.randn(2, 1, 8, generator=random)
    whole = build_model(micro_checkpoint)
    silence = whole.encode(torch.zeros(1, 8, 20))[0, positions:context].numpy()

    cross_kv = model.cross_kv(features)

    for block, (keys, values) in zip(model.decoder.blocks, cross_kv, strict=True):
        assert keys.shape == (2, 8, context)
        assert values.shape == (2, context, 8)
        taken = torch.bmm(torch.bmm(q, keys).softmax(-1), values)[:, 0].numpy()
        expected = by_definition(
            padding,
            q[:, 0].numpy(),
            features[0].numpy(),
            silence,
            context - positions,
            block.cross_attn,
        )
        np.testing.assert_allclose(taken, expected, atol=ATOL)


@pytest.mark.parametrize("padding", PADDINGS)
def test_the_program_gives_what_the_reference_gives(micro_checkpoint: Any, padding: str) -> None:
    context = 4 if padding == "none" else 9
    window = Window(positions=4, audio_positions=4, context_positions=context, padding=padding)
    model = build_model(micro_checkpoint, window)
    features = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(0))

    with torch.no_grad():
        programs = PaddedCrossKV(model.decoder, model.padding)(features)

    keys, values = zip(*model.cross_kv(features), strict=True)
    for ours, theirs in zip(programs, (*keys, *values), strict=True):
        assert torch.equal(ours, theirs)


def test_the_encoder_has_the_first_positions_of_the_table(micro_checkpoint: Any) -> None:
    window = Window(positions=4, audio_positions=4, context_positions=10, padding="features")

    model = build_model(micro_checkpoint, window)

    table = micro_checkpoint.weights["encoder.positional_embedding"]
    assert torch.equal(model.encoder.positional_embedding, table[:4])
    assert model.dims == replace(micro_checkpoint.dims, n_audio_ctx=4)
    assert model.encode(torch.zeros(1, 8, 8)).shape == (1, 4, 16)


def test_a_checkpoint_is_not_changed_by_shortening_it(micro_checkpoint: Any) -> None:
    build_model(
        micro_checkpoint,
        Window(positions=4, audio_positions=4, context_positions=10, padding="silence"),
    )

    assert micro_checkpoint.dims.n_audio_ctx == 10
    assert len(micro_checkpoint.weights["encoder.positional_embedding"]) == 10


# Equalized channels: the same numbers from an encoder whose channels have ranges that are more alike.

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
