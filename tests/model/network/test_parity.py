"""The model and its programs against openai-whisper and transformers, from files on disk.

Weights are random: parity is a matter of arithmetic, and random weights leave no term idle.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from whisperport.model.checkpoint import Checkpoint, load_checkpoint
from whisperport.model.network.whisper import Whisper, build_model
from whisperport.program.dims import Dims
from whisperport.runtime import Decoder, Engine
from whisperport.speech.text.vocabulary import openai_tokenizer

from ...extent import core_or_all

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
