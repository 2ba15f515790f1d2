"""Tiny Whisper checkpoints with random weights, made by the libraries people make theirs with.

Width 64, 2 heads, 2 + 2 layers, 100 encoder positions (2 s), vocabulary 51865 unless overridden.
Every weight is random, biases and norms too: a bias dropped or swapped then shows in the outputs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Make = Callable[..., Any]


@pytest.fixture(scope="session")
def random_hf_whisper() -> Make:
    """`random_hf_whisper(seed=0, **config)`: a transformers WhisperForConditionalGeneration."""
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    from whisperport.text.vocabulary import openai_generation

    def make(*, seed: int = 0, **overrides: Any) -> Any:
        sizes: dict[str, Any] = {
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
            "num_mel_bins": 80,
            "max_source_positions": 100,
            "max_target_positions": 448,
            "vocab_size": 51865,
            **overrides,
        }
        known = openai_generation(sizes["vocab_size"])
        ids = {
            "decoder_start_token_id": known.start_of_transcript,
            "bos_token_id": known.end_of_text,
            "eos_token_id": known.end_of_text,
            "pad_token_id": known.end_of_text,
            "begin_suppress_tokens": list(known.suppressed_at_start),
        }
        with torch.random.fork_rng(devices=[]):
            model = WhisperForConditionalGeneration(WhisperConfig(**ids, **sizes)).eval()
            _randomize(model, seed)
        model.generation_config = GenerationConfig(
            **ids,
            suppress_tokens=list(known.suppressed),
            no_timestamps_token_id=known.no_timestamps,
            prev_sot_token_id=known.start_of_previous,
            is_multilingual=known.is_multilingual,
            lang_to_id={f"<|{code}|>": i for code, i in known.languages.items()},
            task_to_id=dict(known.tasks),
            alignment_heads=[[sizes["decoder_layers"] - 1, 0], [sizes["decoder_layers"] - 1, 1]],
        )
        return model

    return make


@pytest.fixture(scope="session")
def random_openai_whisper() -> Make:
    """`random_openai_whisper(seed=0, **dims)`: an openai-whisper Whisper of the same size."""
    from whisper.model import ModelDimensions, Whisper

    def make(*, seed: int = 0, **overrides: Any) -> Any:
        dims = {
            "n_mels": 80,
            "n_audio_ctx": 100,
            "n_audio_state": 64,
            "n_audio_head": 2,
            "n_audio_layer": 2,
            "n_vocab": 51865,
            "n_text_ctx": 448,
            "n_text_state": 64,
            "n_text_head": 2,
            "n_text_layer": 2,
            **overrides,
        }
        with torch.random.fork_rng(devices=[]):
            model = Whisper(ModelDimensions(**dims)).eval()
            _randomize(model, seed)
        return model

    return make


@pytest.fixture(scope="session")
def tiny_checkpoint_folder(
    random_hf_whisper: Make, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A Hugging Face folder with a tokenizer.json; made once a session: do not write in it."""
    from whisperport.text.vocabulary import openai_tokenizer

    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    random_hf_whisper().save_pretrained(folder)
    (folder / "tokenizer.json").write_text(openai_tokenizer(51865).to_str(), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny_openai_pt(random_openai_whisper: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `.pt` file; made once a session, so do not write to it."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.pt"
    model = random_openai_whisper()
    torch.save({"dims": vars(model.dims), "model_state_dict": model.state_dict()}, path)
    return path


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_checkpoint_folder: Path) -> Any:
    """The folder, loaded as a whisperport Checkpoint."""
    from whisperport.checkpoint import load_checkpoint

    return load_checkpoint(tiny_checkpoint_folder)


def _randomize(model: torch.nn.Module, seed: int) -> None:
    """Matrices with gain about 1, so that activations neither vanish nor explode in two layers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "encoder.embed_positions" in name:
                continue  # sinusoids in every Whisper
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            elif "norm" in name or "_ln" in name or ".ln" in name:
                parameter.copy_(0.1 * noise + float(name.endswith("weight")))
            else:
                parameter.copy_(0.1 * noise)
