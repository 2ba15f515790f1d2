"""The sizes in a Hugging Face `config.json`, and what else in it this package cannot run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whisperport.checkpoint.json_file import read_json_object
from whisperport.checkpoint.sizes import checked_dims, quoted
from whisperport.dims import Dims
from whisperport.errors import CheckpointError

_WORDS = {
    "n_mels": "num_mel_bins",
    "n_audio_ctx": "max_source_positions",
    "n_audio_state": "d_model",
    "n_audio_head": "encoder_attention_heads",
    "n_audio_layer": "encoder_layers",
    "n_text_ctx": "max_target_positions",
    "n_text_state": "d_model",
    "n_text_head": "decoder_attention_heads",
    "n_text_layer": "decoder_layers",
    "n_vocab": "vocab_size",
    "n_audio_ffn": "encoder_ffn_dim",
    "n_text_ffn": "decoder_ffn_dim",
}

# What transformers takes where a config leaves them out; the tensors' shapes are held against them.
_UNSTATED = {"num_mel_bins": 80, "max_source_positions": 1500, "max_target_positions": 448}

_SNAPSHOTS = "snapshots/*/config.json"  # of a repository in the hub's cache


def read_config(folder: Path) -> tuple[dict[str, Any], Dims]:
    """The whole of `config.json`, and its sizes.

    Raises CheckpointError when it is missing or damaged, is another architecture's, or asks for an
    activation, a scaling or a quantization that the model here does not have.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"`{folder}` is not a checkpoint folder",
            why="it has no config.json",
            hint=_hint_for(folder),
        )
    config = read_json_object(path)
    where = f"`config.json` in `{folder}`"
    _reject_other_architectures(config, where)
    config = _UNSTATED | config
    missing = sorted({word for word in _WORDS.values() if word not in config})
    if missing:
        raise CheckpointError(
            f"{where} does not state every size",
            why=f"missing: {', '.join(missing)}",
            hint="it is a conversion for MLX: give the checkpoint it was made from"
            if "n_audio_state" in config
            else "save the checkpoint again with transformers' `save_pretrained`",
        )
    sizes = {field: config[word] for field, word in _WORDS.items()}
    return config, checked_dims(sizes, what=f"{where} states impossible sizes", words=_WORDS)


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the output projection is the token embedding; so unless the config says otherwise."""
    return config.get("tie_word_embeddings") is not False


def _reject_other_architectures(config: Mapping[str, Any], where: str) -> None:
    if config.get("model_type") != "whisper":
        raise CheckpointError(
            f"{where} is not a Whisper's",
            why=f"its `model_type` is {quoted(config.get('model_type'))}; expected 'whisper'",
            hint="give a Whisper checkpoint as transformers saves it, such as `openai/whisper-tiny`; one "
            "converted for another program cannot be read",
        )
    if config.get("activation_function", "gelu") != "gelu":
        raise CheckpointError(
            f"{where} asks for an activation this package does not have",
            why=f"`activation_function` is {quoted(config['activation_function'])}; expected "
            "'gelu', which every published Whisper has",
        )
    if config.get("scale_embedding", False) is not False:
        raise CheckpointError(
            f"{where} asks for scaled embeddings, which this package does not have",
            why=f"`scale_embedding` is {quoted(config['scale_embedding'])}; expected false, "
            "which every published Whisper has",
        )
    if config.get("quantization_config") is not None:
        raise CheckpointError(
            f"{where} is of a quantized checkpoint",
            why="it has a `quantization_config`; its weights cannot be read as numbers",
            hint="give the checkpoint it was quantized from",
        )


def _hint_for(folder: Path) -> str:
    below = sorted(
        path.parent for path in [*folder.glob("*/config.json"), *folder.glob(_SNAPSHOTS)]
    )
    if below:
        more = f", or another of the {len(below)} in it" if len(below) > 1 else ""
        return f"give the folder inside it: `{below[0]}`{more}"
    pickled = sorted(path.name for path in folder.glob("*.pt"))
    if pickled:
        return f"give the file itself: `{folder / pickled[0]}`"
    return "give the folder that holds config.json, tokenizer.json and model.safetensors"
