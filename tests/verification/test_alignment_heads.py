"""Alignment heads are found if a checkpoint lists none, or wrong ones, and only if it has such heads."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from whisperport.model.checkpoint import Checkpoint, load_checkpoint
from whisperport.model.network.whisper import Whisper, build_model
from whisperport.verification import alignment_heads
from whisperport.verification.alignment_heads import find_alignment_heads, with_alignment_heads
from whisperport.verification.clips import shipped_audio

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


def search(
    checkpoint: Checkpoint, model: Whisper, *listed: tuple[int, int]
) -> tuple[tuple[tuple[int, int], ...], str]:
    generation = replace(checkpoint.generation, alignment_heads=listed)
    changed, warning = find_alignment_heads(generation, checkpoint.tokenizer_json, model)
    return changed.alignment_heads, warning


def without_alignment(checkpoint: Checkpoint) -> Whisper:
    """With random queries, no head attends to the words."""
    model = build_model(checkpoint)
    generator = torch.Generator().manual_seed(0)
    for block in model.decoder.blocks:
        weight = block.cross_attn.query.weight
        block.cross_attn.query.weight = torch.nn.Parameter(
            0.02 * torch.randn(weight.shape, generator=generator), requires_grad=False
        )
    return model


def test_the_heads_that_were_taught_to_align_are_found_again(
    embedded: Checkpoint, model: Whisper
) -> None:
    assert search(embedded, model) == (tuple(sorted(embedded.generation.alignment_heads)), "")


def test_listed_heads_that_align_are_kept_after_one_audio_file(
    embedded: Checkpoint, model: Whisper, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a checkpoint that lists one of its two heads, and one audio file
    monkeypatch.setattr(alignment_heads, "shipped_audio", lambda: shipped_audio()[:1])
    # then it keeps it
    assert search(embedded, model, (1, 0)) == (((1, 0),), "")


def test_listed_heads_of_another_model_are_replaced(embedded: Checkpoint, model: Whisper) -> None:
    # given heads that do not follow the audio, as those of the base are in a fine-tune that lists them
    heads, warning = search(embedded, model, (0, 0), (1, 1))
    # then the model's own are used, and the warning has the errors of both
    assert heads == ((1, 0), (2, 0))
    errors = [float(number) for number in re.findall(r"(\d\.\d\d) s", warning)]
    assert errors == pytest.approx([0.33, 0.06], abs=0.02)
    assert "0.0, 1.1 (layer.head) are replaced by 1.0, 2.0" in warning


def test_heads_that_attend_elsewhere_are_not_used(embedded: Checkpoint) -> None:
    # given a model of which no head attends to the words
    model = without_alignment(embedded)
    # then none is found, and the upper half stands for them
    heads, warning = search(embedded, model)
    assert heads == ((1, 0), (1, 1), (2, 0), (2, 1))
    assert "word timestamps may have large" in warning
    # and those that it lists are kept
    assert search(embedded, model, (0, 1)) == (((0, 1),), "")


def test_no_audio_file_fits_a_window_of_a_fifth_of_a_second(micro: Any) -> None:
    generation, warning = find_alignment_heads(GENERATION, tokenizer_json(), micro)

    assert generation == with_alignment_heads(GENERATION, DIMS)
    assert generation.alignment_heads == ((1, 0), (1, 1))
    assert "none were found" in warning


def test_attention_on_the_words_alone_counts() -> None:
    """One head attends to the word, one to a later time, one to all positions."""
    scores = np.zeros((3, 3, 100), np.float32)
    scores[0, :, 50:60] = 20
    scores[1, :, 80:90] = 20
    decoded = alignment_heads._Decoded(scores, 0, 100, ((1.0, 1.2), (1.0, 1.2)), (0, 2))

    shares = alignment_heads._attention_on_words([decoded])

    assert shares == pytest.approx([1.0, 0.0, 0.21], abs=0.005)
