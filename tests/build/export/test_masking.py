"""The mask of each exported program follows from its target, its precision and the model's scores."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from whisperport.build.export.masking import choose_masks, needed_mask
from whisperport.build.export.placing import Placed
from whisperport.model.network.score_spread import score_spread
from whisperport.model.network.whisper import Whisper
from whisperport.program.bundle import Bundle
from whisperport.program.masks import BOUNDED_MASK, MASKED
from whisperport.program.placement import Placement
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.runtime import DecodeOptions, Decoder, Engine, decode_window, load_engine
from whisperport.targets import RunOptions, get_target
from whisperport.verification.reference import Reference, ReferenceClip, reference_mel

from ...embedded import default_bundle
from ...micro import DIMS, GENERATION

TOKENS = (50, 51, 53, 57, 1, 2, 3, 4, 20, 30)
NAMES = ("cross_kv", "prefill_4", "step", "align")


def clip(model: Whisper, seed: int) -> ReferenceClip:
    """A reference clip of random features, with features or without."""
    features = np.random.default_rng(seed).standard_normal((DIMS.n_audio_ctx, DIMS.n_audio_state))
    none = np.empty((0, DIMS.n_vocab), np.float32)
    return ReferenceClip(
        "noise", "", np.zeros(0, np.int16), TOKENS[:4], TOKENS[4:], features.astype(np.float32), none, none
    )  # fmt: skip


@pytest.fixture(scope="module")
def loud(micro: Whisper) -> Whisper:
    """The micro model with self-attention scores 60 times as large."""
    model = deepcopy(micro)
    for block in model.decoder.blocks:
        block.attn.query.weight.mul_(60)
        block.attn.query.bias.mul_(60)
    return model


def engine_of(model: Whisper, eager_runners: Callable[..., Any], mask: float) -> Engine:
    tables = [
        t.numpy()
        for t in (model.decoder.token_embedding.weight, model.decoder.positional_embedding)
    ]
    runners = eager_runners(model, (4, 7), ((0, 1),))
    return Engine(DIMS, GENERATION, runners, *tables, masks=dict.fromkeys(runners, mask))


def logits(decoder: Decoder, features: np.ndarray) -> np.ndarray:
    """The logits of a prompt and of steps, after another text has left its rows in the cache."""
    decoder.start_window(features)
    decoder.prefill([*range(60, 70), *range(20)][: DIMS.n_text_ctx])
    decoder.start_window(features)
    rows = [*decoder.prefill(TOKENS[:7], second_index=2)]
    return np.stack([*rows, *(decoder.step(token) for token in TOKENS[7:])])


@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_the_needed_mask_gives_the_logits_of_an_infinite_one(
    micro: Whisper, loud: Whisper, eager_runners: Callable[..., Any], scale: float
) -> None:
    model = micro if scale == 1 else loud
    reference = Reference((clip(model, 0), clip(model, 1)), 10)

    mask = needed_mask(model, reference)

    features = reference.clips[0].features
    expected = logits(Decoder(engine_of(model, eager_runners, MASKED)), features)
    found = logits(Decoder(engine_of(model, eager_runners, mask)), features)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert (mask > BOUNDED_MASK) == (scale == 1)
    if scale > 1:  # here -64 is wrong, so the comparison above can fail
        weak = logits(Decoder(engine_of(model, eager_runners, BOUNDED_MASK)), features)
        assert np.abs(weak - expected).max() > 1e-2


def test_outliers_that_keep_the_function_keep_the_needed_mask(micro: Whisper) -> None:
    # given: three channels of the residual stream's norm 100 times as large, the weights after it smaller
    model = deepcopy(micro)
    for block in model.decoder.blocks:
        for norm, readers in (
            (block.attn_ln, (block.attn.query, block.attn.key, block.attn.value)),
            (block.mlp_ln, (block.mlp[0],)),
        ):
            norm.weight[:3] *= 100
            norm.bias[:3] *= 100
            for reader in readers:
                reader.weight[:, :3] /= 100
    reference = Reference((clip(model, 0),), 10)

    spreads = [
        score_spread(m.decoder, [(m.cross_kv(torch.from_numpy(reference.clips[0].features)[None]), TOKENS)])
        for m in (micro, model)
    ]  # fmt: skip
    assert spreads[1] == pytest.approx(spreads[0], rel=1e-4)
    assert needed_mask(model, reference) == needed_mask(micro, reference)


def test_the_spread_is_that_of_the_scores_written_out(micro: Whisper) -> None:
    block = micro.decoder.blocks[0]
    features = torch.randn(1, 10, 16, generator=torch.Generator().manual_seed(0))
    other = (9, 8, 7)

    # when: one text whose only layer is the first
    first = deepcopy(micro.decoder)
    first.blocks = first.blocks[:1]
    cross_kv = micro.cross_kv(features)[:1]
    found = score_spread(first, [(cross_kv, TOKENS), (cross_kv, other)])

    def rows(tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        embedding = micro.decoder.token_embedding.weight[list(tokens)]
        x = embedding + micro.decoder.positional_embedding[: len(tokens)]
        normed = block.attn_ln(torch.cat([x, torch.zeros(1, 16)]))
        q, k = block.attn.query(normed), block.attn.key(normed)
        return q[: len(tokens)].reshape(-1, 2, 8), k.reshape(-1, 2, 8)

    texts = [rows(TOKENS), rows(other)]
    expected = 0.0
    for q, own in texts:
        for i in range(len(q)):
            for head in range(2):
                score = [float(q[i, head] @ k) / 8**0.5 for k in own[: i + 1, head]]
                hidden = [
                    float(q[i, head] @ k) / 8**0.5 for _, keys in texts for k in keys[:, head]
                ]
                expected = max(expected, max([0.0, *hidden]) - max(score))
    assert found == pytest.approx(expected, rel=1e-4)
    assert score_spread(first, []) == 0


def placed(**precisions: str) -> Placed:
    """Placements of the decode programs on a target with masks of its own."""
    target = deepcopy(get_target("onnxruntime"))
    target.spec = replace(
        target.spec, lowering=replace(target.spec.lowering, masks={"w8a8": -40.0})
    )
    return Placed(
        {name: Placement("onnxruntime", precisions.get(name, "fp32")) for name in NAMES},
        {"onnxruntime": target},
    )


def specs() -> list[ProgramSpec]:
    mask = (TensorSpec("mask", (1, 1, 25)),)
    return [ProgramSpec(name, () if name == "cross_kv" else mask, ()) for name in NAMES]


def test_each_program_gets_the_mask_of_its_precision(micro: Whisper) -> None:
    where = placed(prefill_4="w8a8", step="fp16", cross_kv="w8a8")

    masks = choose_masks(specs(), where, micro, Reference((clip(micro, 0),), 10))

    assert masks == {"cross_kv": MASKED, "prefill_4": -40.0, "step": -64.0, "align": MASKED}


def test_a_model_with_larger_scores_gets_a_lower_mask_and_a_warning(
    loud: Whisper, caplog: pytest.LogCaptureFixture
) -> None:
    reference = Reference((clip(loud, 0),), 10)

    masks = choose_masks(specs(), placed(step="fp16"), loud, reference)

    needed = needed_mask(loud, reference)
    assert MASKED < needed < BOUNDED_MASK
    assert masks == {"cross_kv": MASKED, "prefill_4": MASKED, "step": needed, "align": MASKED}
    assert f"a mask of {needed:g}" in caplog.text


def test_no_scores_are_measured_if_every_program_is_in_float32() -> None:
    model: Any = None  # would fail if it were used

    assert set(choose_masks(specs(), placed(), model, Reference((), 0)).values()) == {MASKED}


def test_the_embedded_model_decodes_the_same_logits_with_the_bounded_mask() -> None:
    """Measured: the logits are bit-identical from -32 on, and -24 changes them by 8e-5."""
    bundle, run = (
        Bundle.open(default_bundle(), check_hashes=False),
        RunOptions(threads=1, trust=True),
    )
    reference = Reference.from_arrays(bundle.reference())
    manifest = bundle.manifest
    bounded = replace(
        manifest,
        programs=tuple(
            replace(e, placement=replace(e.placement, mask=BOUNDED_MASK))
            if any(t.name == "mask" for t in e.spec.inputs)
            else e
            for e in manifest.programs
        ),
    )
    decoders = [Decoder(load_engine(b, run)) for b in (bundle, replace(bundle, manifest=bounded))]
    options = DecodeOptions(language="en", prompt=tuple(range(400, 520)))

    for one in reference.clips[:2]:
        features = decoders[0].engine.encode(reference_mel(manifest.dims, one))
        found = [decode_window(decoder, features, options) for decoder in decoders]
        last = [decoder.step(found[0].tokens[-1]) for decoder in decoders]

        assert len(found[0].tokens) > 5
        assert found[1].tokens == found[0].tokens
        np.testing.assert_array_equal(last[1], last[0])
