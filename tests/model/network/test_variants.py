"""The variants of encoder and decoder in torch, compared with the model."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whisperport.model.network.encoder import NchwEncoder
from whisperport.model.network.uncached_decoder import UncachedDecoder
from whisperport.model.network.whisper import Whisper, build_model
from whisperport.program.spec import UncachedForm
from whisperport.program.window import Window

# Float32 sums in another order. Measured: 2e-6 at most.
ATOL = 1e-5


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
    from whisperport.model.network.vocab_projection import vocabulary_pieces

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
