"""The forms of encoder and decoder in torch, compared with the model."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.network.decoder import BatchDecode, CrossKV, Decode, Prefill
from whisperport.model.network.encoder import NchwEncoder
from whisperport.model.network.rank4 import Rank4CrossKV, Rank4Decode, Rank4Prefill, UncachedDecoder
from whisperport.model.network.short_window import PaddedCrossKV
from whisperport.model.network.whisper import CachedDecoder, Whisper, build_model
from whisperport.program.spec import UncachedForm
from whisperport.program.window import Window
from whisperport.verification.array_comparison import compare
from whisperport.verification.tolerances import LOWERED

from ...extent import core_or_all
from ...micro import DIMS

# The decoder with a cache, against the model without one.


# Sums of 16 float32 products in two orders, through two layers; logits reach 15.
CACHED_ATOL = 1e-5 * 15

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
        np.testing.assert_allclose(decoder(tokens), expected, atol=CACHED_ATOL, rtol=0)


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


# The batch step computes for every row what the step computes for that row alone.

ROWS = 3
ATOL = 1e-5  # float32 sums in another order


@torch.no_grad()
def test_each_row_gives_the_outputs_of_the_step_with_its_own_mask_cache_and_audio(
    micro: Whisper,
) -> None:
    """Each row has another number of tokens, and other audio."""
    dims, generator = micro.dims, torch.Generator().manual_seed(0)
    heads, width, n, t = dims.n_text_head, dims.text_head_width, dims.n_text_ctx, 5
    shapes = (heads, width, n), (heads, n, width), (heads, width, t), (heads, t, width)
    caches = [
        [torch.randn(ROWS, *shape, generator=generator) for _ in range(dims.n_text_layer)]
        for shape in shapes
    ]
    x = torch.randn(ROWS, 1, dims.n_text_state, generator=generator)
    mask = torch.zeros(ROWS, 1, n + 1)
    for row, length in enumerate((0, 5, n)):
        mask[row, :, length:n] = -64
    folded = [[layer.flatten(0, 1) for layer in layers] for layers in caches]

    found = BatchDecode(micro.decoder)(x, mask, *folded)

    logits, *new = found
    assert logits.shape == (ROWS, dims.n_vocab)
    for row in range(ROWS):
        own = [[layer[row] for layer in layers] for layers in caches]
        expected, *new_of_row = Decode(micro.decoder)(x[row][None], mask[row][None], *own)
        torch.testing.assert_close(logits[row], expected[0], atol=ATOL, rtol=0)
        for batch, one in zip(new, new_of_row, strict=True):
            part = batch[row * heads : (row + 1) * heads]
            torch.testing.assert_close(part, one, atol=ATOL, rtol=0)


def test_the_batch_step_shares_the_weights_of_the_step(micro: Whisper) -> None:
    own = {p.untyped_storage().data_ptr() for p in Decode(micro.decoder).parameters()}

    assert {p.untyped_storage().data_ptr() for p in BatchDecode(micro.decoder).parameters()} == own


# The variants of encoder and decoder in torch, compared with the model.


def embedded(
    model: Whisper, tokens: torch.Tensor, form: UncachedForm, after: float
) -> torch.Tensor:
    """Embeddings (1, d, S, 1) or (1, d, 1, S) of tokens, as written in the spec; `after` in other rows."""
    rows = torch.full((form.sequence_length, model.dims.n_text_state), after)
    rows[: len(tokens)] = model.decoder.token_embedding.weight[tokens]
    if form.positions == "host":
        rows[: len(tokens)] += model.decoder.positional_embedding[: len(tokens)]
        return rows[None, :, None].permute(0, 3, 1, 2)
    return rows[None, None].permute(0, 3, 1, 2)


def test_the_nchw_encoder_gives_the_features_of_the_encoder(micro: Whisper) -> None:
    mel = torch.randn(1, 8, 20, generator=torch.Generator().manual_seed(1))

    features = NchwEncoder(micro.encoder).eval()(mel[:, :, None])

    torch.testing.assert_close(features, micro.encode(mel), atol=ATOL, rtol=0)


def test_the_nchw_encoder_shares_the_weights_of_the_encoder(micro: Whisper) -> None:
    theirs = {p.untyped_storage().data_ptr() for p in micro.encoder.parameters()}

    assert {
        p.untyped_storage().data_ptr() for p in NchwEncoder(micro.encoder).parameters()
    } == theirs


def test_the_mask_takes_nothing_of_the_range_that_a_quantizer_divides(micro: Whisper) -> None:
    """Hailo's own graph has 0 and -inf; a large finite number would be the range."""
    mask = UncachedDecoder(micro.decoder, UncachedForm(9)).causal

    assert torch.isneginf(mask).equal(torch.ones(9, 9, dtype=torch.bool).triu(1))
    assert set(mask[~torch.isneginf(mask)].tolist()) == {0.0}


@settings(max_examples=40)
@given(
    count=st.integers(1, 9),
    rows=st.integers(9, 24),
    positions=st.sampled_from(["host", "graph"]),
    pieces=st.integers(1, 5),
    after=st.sampled_from([0.0, 3.0, -50.0]),
    seed=st.integers(0, 1000),
)
def test_the_decoder_without_a_cache_gives_the_models_logits_whatever_is_in_later_rows(
    micro: Whisper, count: int, rows: int, positions: Any, pieces: int, after: float, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(micro.dims.n_vocab, (count,), generator=random)
    features = torch.randn(1, 10, 16, generator=random)
    form = UncachedForm(rows, positions, pieces)

    with torch.no_grad():
        made = UncachedDecoder(micro.decoder, form).eval()(
            features, embedded(micro, tokens, form, after)
        )

    expected = micro.logits(tokens, micro.cross_kv(features))
    assert all(piece.shape[:2] == (1, rows) for piece in made)
    torch.testing.assert_close(torch.cat(made, -1)[0, :count], expected, atol=ATOL, rtol=0)


def test_the_decoder_without_a_cache_attends_to_no_padding(
    micro_checkpoint: Any,
) -> None:
    model = build_model(
        micro_checkpoint,
        Window(positions=5, audio_positions=5, context_positions=9, padding="features"),
    )
    features, tokens, form = torch.randn(1, 5, 16), torch.tensor([50, 3]), UncachedForm(8)

    with torch.no_grad():
        made = UncachedDecoder(model.decoder, form).eval()(
            features, embedded(model, tokens, form, 0.0)
        )

    bare = model.logits(tokens, model.cross_kv(features, padded=False))
    padded = model.logits(tokens, model.cross_kv(features))
    torch.testing.assert_close(torch.cat(made, -1)[0, :2], bare, atol=ATOL, rtol=0)
    assert not torch.allclose(bare, padded, atol=1e-2)


@pytest.mark.parametrize(
    ("n_vocab", "columns"),
    [
        (51865, [12966, 12966, 12966, 12967]),  # as in hailo-whisper
        (51864, [12966] * 4),
        (51866, [12966, 12967, 12966, 12967]),
        (7, [1, 2, 2, 2]),
    ],
)
def test_pieces_of_the_vocabulary_differ_by_one_column(n_vocab: int, columns: list[int]) -> None:
    from whisperport.model.network.decoder import vocabulary_pieces

    table = torch.arange(n_vocab, dtype=torch.float32)[:, None]

    pieces = vocabulary_pieces(table, 4)

    assert [piece.out_features for piece in pieces] == columns
    np.testing.assert_array_equal(torch.cat([p.weight for p in pieces]), table)


@pytest.mark.parametrize(("rows", "pieces"), [(7, 4), (32, 0), (-1, 4)])
def test_impossible_forms_are_rejected(rows: int, pieces: int) -> None:
    with pytest.raises(ValueError, match="expected at least 8 and 1"):
        UncachedForm(rows, pieces=pieces)


def test_an_unloaded_model_leaves_the_weights_of_its_checkpoint_alone(
    micro_checkpoint: Any,
) -> None:
    before = {name: weight.clone() for name, weight in micro_checkpoint.weights.items()}
    model = build_model(micro_checkpoint)

    model.unload()

    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    for name, weight in micro_checkpoint.weights.items():
        torch.testing.assert_close(weight, before[name], atol=0, rtol=0)
