"""Alignment heads are found if a checkpoint lists none, and only if it has such heads."""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from whisperport.build.export.drafting import with_alignment_heads
from whisperport.model.checkpoint import Checkpoint, load_checkpoint
from whisperport.model.network.whisper import Whisper, build_model
from whisperport.verification import alignment_heads
from whisperport.verification.alignment_heads import find_alignment_heads

from ..micro import DIMS, GENERATION, tokenizer_json


@pytest.fixture(scope="module")
def embedded() -> Checkpoint:
    return load_checkpoint("default")


@pytest.fixture(scope="module")
def model(embedded: Checkpoint) -> Whisper:
    return build_model(embedded)


@pytest.fixture(autouse=True)
def two_audio_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment_heads, "N_FILES", 2)


def search(checkpoint: Checkpoint, model: Whisper) -> tuple[tuple[int, int], ...]:
    unnamed = replace(checkpoint.generation, alignment_heads=())
    return find_alignment_heads(unnamed, checkpoint.tokenizer_json, model).alignment_heads


def test_the_heads_that_were_taught_to_align_are_found_again(
    embedded: Checkpoint, model: Whisper
) -> None:
    assert search(embedded, model) == tuple(sorted(embedded.generation.alignment_heads))


def test_heads_that_are_named_are_not_looked_for(embedded: Checkpoint) -> None:
    no_model: Any = None

    found = find_alignment_heads(embedded.generation, embedded.tokenizer_json, no_model)

    assert found == embedded.generation


def test_heads_that_attend_elsewhere_are_not_used(
    embedded: Checkpoint, model: Whisper, caplog: pytest.LogCaptureFixture
) -> None:
    """With random queries, no head attends to the words."""
    spoiled = build_model(embedded)
    generator = torch.Generator().manual_seed(0)
    for block in spoiled.decoder.blocks:
        weight = block.cross_attn.query.weight
        block.cross_attn.query.weight = torch.nn.Parameter(
            0.02 * torch.randn(weight.shape, generator=generator), requires_grad=False
        )

    with caplog.at_level(logging.WARNING):
        found = search(embedded, spoiled)

    assert found == ()
    assert "word timestamps may have large" in caplog.text


def test_no_audio_file_fits_a_window_of_a_fifth_of_a_second(
    micro: Any, caplog: pytest.LogCaptureFixture
) -> None:
    found = find_alignment_heads(GENERATION, tokenizer_json(), micro)

    assert found == GENERATION
    assert with_alignment_heads(found, DIMS).alignment_heads == ((1, 0), (1, 1))


def test_attention_on_the_words_alone_counts() -> None:
    """One head attends to the word, one to a later time, one to all positions."""
    scores = np.zeros((3, 3, 100), np.float32)
    scores[0, :, 50:60] = 20
    scores[1, :, 80:90] = 20
    decoded = alignment_heads._Decoded(scores, 0, 100, ((1.0, 1.2), (1.0, 1.2)), (0, 2))

    shares = alignment_heads._attention_on_words([decoded])

    assert shares == pytest.approx([1.0, 0.0, 0.21], abs=0.005)
