"""The decoder with a cache, against the model without one."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.network.cached_decoder import CachedDecoder
from whisperport.model.network.decoder import CrossKV, Decode, Prefill
from whisperport.model.network.rank4_decoder import Rank4CrossKV, Rank4Decode, Rank4Prefill
from whisperport.model.network.short_window import PaddedCrossKV
from whisperport.model.network.whisper import Whisper, build_model
from whisperport.program.window import Window
from whisperport.verification.compare import compare
from whisperport.verification.tolerances import LOWERED

from ...extent import core_or_all
from ...micro import DIMS

# Sums of 16 float32 products in two orders, through two layers; logits reach 15.
ATOL = 1e-5 * 15

# Few different ids, so that runs often share their first tokens and then part.
runs = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=DIMS.n_text_ctx), min_size=1, max_size=6
)


@given(runs=runs)
@settings(max_examples=60)
def test_logits_after_any_runs_of_tokens_are_those_without_a_cache(
    micro: Whisper, runs: list[list[int]]
) -> None:
    features = torch.randn(1, 10, 16, generator=torch.Generator().manual_seed(1))
    cross_kv = micro.cross_kv(features)
    decoder = CachedDecoder(micro.decoder, cross_kv)

    for tokens in runs:
        expected = micro.logits(torch.tensor(tokens), cross_kv)[-1]
        np.testing.assert_allclose(decoder(tokens), expected, atol=ATOL, rtol=0)


# The rank-4 decoder programs compute what the default ones compute, on the same arrays.


@pytest.fixture(
    scope="module", params=core_or_all(["micro", "embedded"], ["micro", "tiny", "embedded"])
)
def model(request: pytest.FixtureRequest) -> Whisper:
    """The micro model, a random one with the vocabulary of tiny, and the model of the package."""
    if request.param == "micro":
        micro: Whisper = request.getfixturevalue("micro")
        return micro
    if request.param == "tiny":
        return build_model(request.getfixturevalue("tiny_checkpoint"))
    return build_model(load_checkpoint("default"))


def decoder_inputs(model: Whisper, count: int) -> tuple[Any, ...]:
    """Noise in place of a token's embedding and of caches, of which half are masked, and the mask."""
    dims, generator = model.dims, torch.Generator().manual_seed(count)
    heads, width, n, t = dims.n_text_head, dims.text_head_width, dims.n_text_ctx, 50

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    mask = torch.zeros(1, count, n + count)
    mask[..., n // 2 : n] = -64
    mask[..., n:] = torch.full((count, count), -64.0).triu(1)
    shapes = (heads, width, n), (heads, n, width), (heads, width, t), (heads, t, width)
    caches = [[noise(*shape) for _ in range(dims.n_text_layer)] for shape in shapes]
    return noise(1, count, dims.n_text_state), mask, caches


def with_leading_axis(caches: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[tensor[None] for tensor in layers] for layers in caches]


def check(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Compare outputs that differ in a first axis of size 1."""
    assert [tuple(t.shape) for t in found] == [(1, *t.shape) for t in expected]
    for index, (one, wanted) in enumerate(zip(found, expected, strict=True)):
        compared = compare(str(index), one[0].numpy(), wanted.numpy(), LOWERED["float32"])
        assert not compared.reason


@torch.no_grad()
def test_the_rank_4_step_gives_the_outputs_of_the_step(model: Whisper) -> None:
    x, mask, caches = decoder_inputs(model, 1)

    found = Rank4Decode(model.decoder)(x, mask[None], *with_leading_axis(caches))

    check(found, Decode(model.decoder)(x, mask, *caches))


@torch.no_grad()
def test_the_rank_4_prefill_gives_the_outputs_of_the_prefill(model: Whisper) -> None:
    x, mask, caches = decoder_inputs(model, 4)
    pick = torch.eye(4)[None, [3, 1]]

    found = Rank4Prefill(model.decoder)(x, mask[None], pick, *with_leading_axis(caches))

    check(found, Prefill(model.decoder)(x, mask, pick, *caches))


@torch.no_grad()
def test_the_rank_4_cross_attention_keys_and_values_are_the_usual_ones(model: Whisper) -> None:
    features = torch.randn(1, 50, model.dims.n_audio_state, generator=torch.Generator())

    found = Rank4CrossKV(model.decoder)(features)

    check(found, CrossKV(model.decoder)(features))


@torch.no_grad()
@pytest.mark.parametrize("padding", ["features", "keys-and-values", "silence"])
def test_a_short_windows_padding_is_the_same_in_rank_4(micro_checkpoint: Any, padding: Any) -> None:
    window = Window(positions=5, audio_positions=5, context_positions=9, padding=padding)
    model = build_model(micro_checkpoint, window)
    assert model.padding is not None
    features = torch.randn(1, 5, 16, generator=torch.Generator())

    found = Rank4CrossKV(model.decoder, model.padding)(features)

    check(found, PaddedCrossKV(model.decoder, model.padding)(features))
    assert found[0].shape == (1, 2, 8, 9)


def test_the_rank_4_programs_share_the_weights_of_the_model(micro: Whisper) -> None:
    theirs = {p.untyped_storage().data_ptr() for p in micro.decoder.parameters()}

    for module in (Rank4Decode(micro.decoder), Rank4CrossKV(micro.decoder)):
        own = {p.untyped_storage().data_ptr() for p in module.parameters()}
        assert own
        assert own <= theirs
    np.testing.assert_equal(len(theirs) > 10, True)
