"""What eager torch tells before a bundle is written: its alignment heads, and the reference."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from whisperport.model.checkpoint import Checkpoint, load_checkpoint
from whisperport.model.network import whisper
from whisperport.model.network.whisper import CachedDecoder, Whisper, build_model
from whisperport.program.bundle import Bundle
from whisperport.verification import alignment_heads
from whisperport.verification.alignment_heads import find_alignment_heads, with_alignment_heads
from whisperport.verification.clips import Clip, shipped_audio, shipped_clips
from whisperport.verification.eager import KEPT_LOGITS, CrossKV, greedy_tokens, run_eager
from whisperport.verification.reference import Reference

from ..embedded import default_bundle
from ..extent import core_or_all
from ..micro import DIMS, GENERATION, tokenizer_json

# Hides what the micro model says most: tokens at the start, and one anywhere.
HIDING = replace(
    GENERATION,
    suppressed=(*GENERATION.suppressed, 48),
    suppressed_at_start=(34, 49, 68),
)
PROMPT = [50, 51, 53, 57]
MAX_TOKENS = DIMS.n_text_ctx - len(PROMPT)
SOUNDS = core_or_all(range(11, 16), range(16))  # the text of 14 ends early, all others are long
ATOL = 1e-5 * 15  # of logits: sums of 16 float32 products in two orders, through two layers

Make = Callable[[Whisper, CrossKV], Callable[[list[int]], Tensor]]


def one_by_one(model: Whisper, cross_kv: CrossKV) -> list[int]:
    """Greedy decoding that computes everything again for every token."""
    tokens: list[int] = []
    while len(tokens) < MAX_TOKENS and 49 not in tokens:
        logits = model.logits(torch.tensor(PROMPT + tokens), cross_kv)[-1]
        hidden = HIDING.suppressed + (() if tokens else HIDING.suppressed_at_start)
        logits[list(hidden)] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens


def sounds(model: Whisper) -> Iterator[CrossKV]:
    for seed in SOUNDS:
        random = torch.Generator().manual_seed(seed)
        yield model.cross_kv(3 * torch.randn(1, 10, 16, generator=random))


def right(model: Whisper, cross_kv: CrossKV) -> Callable[[list[int]], Tensor]:
    return lambda tokens: model.logits(torch.tensor(tokens), cross_kv)[-1]


def cached(model: Whisper, cross_kv: CrossKV) -> Callable[[list[int]], Tensor]:
    return CachedDecoder(model.decoder, cross_kv)


def random_tokens(*_: Any) -> Callable[[list[int]], Tensor]:
    random = torch.Generator().manual_seed(0)
    return lambda _: torch.randn(DIMS.n_vocab, generator=random)


def always(token: int) -> Make:
    logits = torch.zeros(DIMS.n_vocab)
    logits[token] = 1
    return lambda *_: lambda _: logits


def not_finite(*_: Any) -> Callable[[list[int]], Tensor]:
    return lambda _: torch.full((DIMS.n_vocab,), torch.nan)


def without_the_sound(model: Whisper, cross_kv: CrossKV) -> Callable[[list[int]], Tensor]:
    """Right about some tokens, wrong about others."""
    return right(model, tuple((0 * keys, values) for keys, values in cross_kv))


@pytest.mark.parametrize(
    "draft",
    [right, cached, random_tokens, always(7), always(49), not_finite, without_the_sound],
    ids=["right", "cached", "random", "one token", "the end", "nan", "without the sound"],
)
def test_tokens_are_those_of_decoding_one_by_one_whatever_is_guessed(
    micro: Whisper, draft: Make
) -> None:
    lengths = set()
    for cross_kv in sounds(micro):
        made = draft(micro, cross_kv)
        tokens, margins = greedy_tokens(micro, HIDING, PROMPT, cross_kv, MAX_TOKENS, made)

        assert tokens == one_by_one(micro, cross_kv)
        assert len(margins) == len(tokens)
        lengths.add(len(tokens))
    assert len(lengths) > 1  # some end early


@pytest.mark.parametrize("draft", [right, cached], ids=["right", "cached"])
def test_right_guesses_take_one_pass(
    micro: Whisper, draft: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cross_kv in sounds(micro):
        made = draft(micro, cross_kv)
        expected = one_by_one(micro, cross_kv)
        passes: list[list[int]] = []

        def seen(
            tokens: Tensor, cross_kv: CrossKV, *, first: int = 0, passes: list[list[int]] = passes
        ) -> Tensor:
            if first:
                passes.append(tokens.tolist())
            return Whisper.logits(micro, tokens, cross_kv, first=first)

        with monkeypatch.context() as patch:
            patch.setattr(micro, "logits", seen)
            greedy_tokens(micro, HIDING, PROMPT, cross_kv, MAX_TOKENS, made)

        assert passes == [PROMPT + expected[:-1]]


def reference(model: Whisper) -> Reference:
    random = np.random.default_rng(0)
    clips = [
        Clip(f"{i}", "", (0.1 * random.standard_normal(3200)).astype(np.float32)) for i in range(3)
    ]
    return run_eager(model, HIDING, clips)


def test_a_reference_made_with_wrong_guesses_is_the_same(
    micro: Whisper, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference(micro).to_arrays()
    monkeypatch.setattr(whisper, "CachedDecoder", random_tokens)

    found = reference(micro).to_arrays()

    assert found.keys() == expected.keys()
    for name, array in found.items():
        if array.dtype == np.float32:
            np.testing.assert_allclose(array, expected[name], atol=ATOL, rtol=0)
        else:
            np.testing.assert_array_equal(array, expected[name])


def test_kept_logits_are_those_that_each_of_the_first_tokens_was_chosen_by(micro: Whisper) -> None:
    clip = reference(micro).clips[0]

    cross_kv = micro.cross_kv(torch.from_numpy(clip.features)[None])
    assert len(clip.logits) == min(KEPT_LOGITS, len(clip.tokens))
    for count, row in enumerate(clip.logits):
        fed = torch.tensor([*clip.prompt, *clip.tokens[:count]])
        np.testing.assert_allclose(row, micro.logits(fed, cross_kv)[-1], atol=ATOL, rtol=0)


def test_the_shipped_reference_is_what_the_shipped_checkpoint_chooses() -> None:
    bundle = Bundle.open(default_bundle())
    stored = Reference.from_arrays(bundle.reference())
    checkpoint = load_checkpoint("default")
    model = build_model(checkpoint, bundle.manifest.window)

    made = run_eager(model, checkpoint.generation, shipped_clips(1))

    assert [clip.tokens for clip in made.clips] == [clip.tokens for clip in stored.clips[:1]]
    for ours, theirs in zip(made.clips, stored.clips, strict=False):
        # Measured: 1e-4 at most.
        np.testing.assert_allclose(ours.logits, theirs.logits, atol=1e-3, rtol=0)


# Alignment heads are found if a checkpoint lists none, or wrong ones, and only if it has such heads.


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
