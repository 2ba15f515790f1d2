"""The model and its programs against openai-whisper and transformers, and encoders of short windows."""

import copy
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from whisperport.model.checkpoint import Checkpoint, load_checkpoint
from whisperport.model.network.encoder import Encoder, EncoderBlock
from whisperport.model.network.equalization import equalize
from whisperport.model.network.short_window import PaddedCrossKV
from whisperport.model.network.whisper import Whisper, build_model
from whisperport.program.dims import Dims
from whisperport.program.window import PADDINGS, Window
from whisperport.runtime import Decoder, Engine
from whisperport.speech.text.vocabulary import openai_tokenizer

from ...extent import core_or_all
from ...micro import whisper_dims

# Two float32 implementations that sum in other orders. Measured: 2.4e-6 at most for features (which
# spread by 1) and 1.4e-5 for logits (which spread by 5 and reach 25), 32 layers deep.
ATOL = 1e-4

# Random matrices give logits that spread by 1; trained ones spread by several, and errors with them.
LOGIT_SPREAD = 5.0


class Size(NamedTuple):
    d: int
    heads: int
    encoder: int  # layers
    decoder: int  # layers
    mels: int
    vocab: int


# The sizes that tell Whisper's families apart. Narrowed ones keep depth, mels and vocabulary: width
# only repeats.
SIZES = {
    "tiny": Size(*core_or_all((128, 2), (384, 6)), encoder=4, decoder=4, mels=80, vocab=51865),
    "base.en": Size(d=512, heads=8, encoder=6, decoder=6, mels=80, vocab=51864),
    "turbo, narrowed": Size(d=64, heads=2, encoder=32, decoder=4, mels=128, vocab=51866),
    "large-v3, narrowed": Size(d=64, heads=4, encoder=5, decoder=5, mels=128, vocab=51866),
    "distil, narrowed": Size(d=64, heads=2, encoder=8, decoder=2, mels=80, vocab=51864),
}
FORMS = ("transformers", "openai-whisper")
# The core has every form and depth, and every vocabulary of openai-whisper's form, where the number of
# tokens tells the languages. The other pairs repeat.
PAIRS = core_or_all(
    [
        *(f"{form}: tiny" for form in FORMS),
        "transformers: large-v3, narrowed",
        "openai-whisper: turbo, narrowed",
        "openai-whisper: distil, narrowed",
    ],
    [f"{form}: {size}" for size in SIZES for form in FORMS],
)


@dataclass(frozen=True)
class Pair:
    """One checkpoint: the model of its own library, and the one that this package loads."""

    features: Tensor  # (1, T, d), theirs
    logits: Tensor  # (S, V), theirs, for TOKENS
    checkpoint: Checkpoint
    model: Whisper
    mel: Tensor  # (1, n_mels, 2T)


def tokens_of(n_vocab: int) -> list[int]:
    """Token ids from all parts of the vocabulary, including the last one."""
    return [*range(0, n_vocab, n_vocab // 11), n_vocab - 1]


@pytest.fixture(scope="module", params=PAIRS)
def pair(
    request: pytest.FixtureRequest,
    random_hf_whisper: Callable[..., Any],
    random_openai_whisper: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    form, _, name = request.param.partition(": ")
    size, folder = SIZES[name], tmp_path_factory.mktemp("parity")
    mel = torch.randn(1, size.mels, 3000, generator=torch.Generator().manual_seed(1))
    make, run = {
        "transformers": (random_hf_whisper, transformers_outputs),
        "openai-whisper": (random_openai_whisper, openai_outputs),
    }[form]
    theirs = make(**(hf_config(size) if form == "transformers" else openai_dims(size)))
    with torch.no_grad():
        features, logits = run(theirs, mel, torch.tensor([tokens_of(size.vocab)]))
    path = save(theirs, form, size, folder)
    del theirs
    checkpoint = load_checkpoint(path)
    yield Pair(features, logits, checkpoint, build_model(checkpoint), mel)
    shutil.rmtree(folder)  # pytest keeps three sessions' folders, and this one is of 300 MB


def hf_config(size: Size) -> dict[str, int]:
    return {
        "d_model": size.d,
        "encoder_layers": size.encoder,
        "decoder_layers": size.decoder,
        "encoder_attention_heads": size.heads,
        "decoder_attention_heads": size.heads,
        "encoder_ffn_dim": 4 * size.d,
        "decoder_ffn_dim": 4 * size.d,
        "num_mel_bins": size.mels,
        "max_source_positions": 1500,
        "vocab_size": size.vocab,
    }


def openai_dims(size: Size) -> dict[str, int]:
    return {
        "n_mels": size.mels,
        "n_vocab": size.vocab,
        "n_audio_ctx": 1500,
        **{f"n_{side}_state": size.d for side in ("audio", "text")},
        **{f"n_{side}_head": size.heads for side in ("audio", "text")},
        "n_audio_layer": size.encoder,
        "n_text_layer": size.decoder,
    }


def transformers_outputs(model: Any, mel: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    model.set_attn_implementation("eager")
    model.model.decoder.embed_tokens.weight.mul_(LOGIT_SPREAD)
    encoded = model.model.encoder(mel)
    logits = model(encoder_outputs=encoded, decoder_input_ids=tokens, use_cache=False).logits
    return encoded.last_hidden_state, logits[0]


def openai_outputs(model: Any, mel: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    model.decoder.token_embedding.weight.mul_(LOGIT_SPREAD)
    features = model.embed_audio(mel)
    return features, model.logits(tokens, features)[0]


def save(model: Any, form: str, size: Size, folder: Path) -> Path:
    if form == "openai-whisper":
        path = folder / "model.pt"
        torch.save({"dims": vars(model.dims), "model_state_dict": model.state_dict()}, path)
        return path
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(openai_tokenizer(size.vocab).to_str())
    return folder


def test_features_equal_those_of_the_library(pair: Pair) -> None:
    ours = pair.model.encode(pair.mel)

    assert ours.shape == pair.features.shape
    np.testing.assert_allclose(ours, pair.features, atol=ATOL, rtol=0)


def test_logits_without_a_cache_equal_those_of_the_library(pair: Pair) -> None:
    cross_kv = pair.model.cross_kv(pair.features)
    tokens = torch.tensor(tokens_of(pair.checkpoint.dims.n_vocab))

    ours = pair.model.logits(tokens, cross_kv)

    assert pair.logits.std() == pytest.approx(LOGIT_SPREAD, rel=0.3)
    np.testing.assert_allclose(ours, pair.logits, atol=ATOL, rtol=0)
    from_the_second = pair.model.logits(tokens, cross_kv, first=1)
    np.testing.assert_allclose(from_the_second, pair.logits[1:], atol=ATOL, rtol=0)


# Prompts of one row, of fewer rows than the program takes (padded), of all of them, and of several
# pieces with a padded last one.
@pytest.mark.parametrize("prompt", [1, 3, 4, 7])
def test_logits_of_the_programs_equal_those_of_the_library(
    pair: Pair, prompt: int, eager_runners: Callable[..., Any]
) -> None:
    dims, theirs = pair.checkpoint.dims, pair.logits.numpy()
    decoder = Decoder(engine_of(pair, eager_runners(pair.model, prefill_rows=(4,))))
    tokens = tokens_of(dims.n_vocab)
    decoder.start_window(pair.features[0].numpy())

    after_prompt, after_first = decoder.prefill(tokens[:prompt], second_index=0)
    after_steps = [decoder.step(token) for token in tokens[prompt:]]

    np.testing.assert_allclose(after_first, theirs[0], atol=ATOL, rtol=0)
    np.testing.assert_allclose(after_prompt, theirs[prompt - 1], atol=ATOL, rtol=0)
    np.testing.assert_allclose(np.stack(after_steps), theirs[prompt:], atol=ATOL, rtol=0)


def test_the_encoder_program_takes_mel_of_the_models_own_height(
    pair: Pair, eager_runners: Callable[..., Any]
) -> None:
    engine = engine_of(pair, eager_runners(pair.model))

    features = engine.encode(pair.mel[0].numpy())

    np.testing.assert_allclose(features, pair.features[0], atol=ATOL, rtol=0)


def test_a_dropped_layer_would_show(pair: Pair) -> None:
    """These tolerances can fail: the model without its last decoder layer is far outside."""
    shortened = Whisper(Dims(**{**asdict(pair.checkpoint.dims), "n_text_layer": 1}))
    kept = {n: t for n, t in pair.model.state_dict().items() if n in shortened.state_dict()}
    shortened.load_state_dict(kept)
    tokens = torch.tensor(tokens_of(pair.checkpoint.dims.n_vocab))

    ours = shortened.logits(tokens, shortened.cross_kv(pair.features))

    assert (ours - pair.logits).abs().max() > 100 * ATOL


def engine_of(pair: Pair, runners: dict[str, Any]) -> Engine:
    weights = pair.checkpoint.weights
    embedding = weights["decoder.token_embedding.weight"].numpy()
    positions = weights["decoder.positional_embedding"].numpy()
    return Engine(pair.checkpoint.dims, pair.checkpoint.generation, runners, embedding, positions)


# Encoders of short windows and with equalized channels, compared with the model

# Short windows in torch: each padding against its definition, written down in numpy.


# Float32 sums of some ten terms, in another order. Measured: 6e-7 at most.
ENCODER_ATOL = 1e-5


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
        np.testing.assert_allclose(taken, expected, atol=ENCODER_ATOL)


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
