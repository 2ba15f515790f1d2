"""Read the sizes in a Hugging Face `config.json`, and reject architectures that are not supported."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whisperport.checkpoint.json_file import read_json_object
from whisperport.checkpoint.sizes import checked_dims, quoted
from whisperport.errors import CheckpointError
from whisperport.program.dims import Dims

_CONFIG_KEYS = {
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

# transformers' defaults for missing sizes. `check_tensors` compares them with the shapes.
_DEFAULT_SIZES = {"num_mel_bins": 80, "max_source_positions": 1500, "max_target_positions": 448}

_HUB_CACHE_CONFIGS = "snapshots/*/config.json"  # pattern in a repository folder of the hub's cache


def read_config(folder: Path) -> tuple[dict[str, Any], Dims]:
    """Return the contents of `config.json`, and the sizes in it.

    Raises:
        CheckpointError: the file is missing or damaged, is of another architecture, or needs an
            activation, embedding scale or quantization that is not supported.
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
    config = _DEFAULT_SIZES | config
    missing = sorted({word for word in _CONFIG_KEYS.values() if word not in config})
    if missing:
        raise CheckpointError(
            f"{where} does not state every size",
            why=f"missing: {', '.join(missing)}",
            hint="it is a conversion for MLX: give the original checkpoint"
            if "n_audio_state" in config
            else "save the checkpoint again with transformers' `save_pretrained`",
        )
    sizes = {field: config[word] for field, word in _CONFIG_KEYS.items()}
    return config, checked_dims(sizes, what=f"{where} states impossible sizes", keys=_CONFIG_KEYS)


def is_tied(config: Mapping[str, Any]) -> bool:
    """Return whether the output projection is tied to the token embedding; True by default."""
    return config.get("tie_word_embeddings") is not False


def _reject_other_architectures(config: Mapping[str, Any], where: str) -> None:
    if config.get("model_type") != "whisper":
        raise CheckpointError(
            f"{where} does not describe a Whisper model",
            why=f"its `model_type` is {quoted(config.get('model_type'))}; expected 'whisper'",
            hint="give a Whisper checkpoint in transformers' format, such as `openai/whisper-tiny`; "
            "checkpoints converted for another program cannot be read",
        )
    if config.get("activation_function", "gelu") != "gelu":
        raise CheckpointError(
            f"{where} needs an activation function that is not supported",
            why=f"`activation_function` is {quoted(config['activation_function'])}; expected "
            "'gelu', as in every published Whisper model",
        )
    if config.get("scale_embedding", False) is not False:
        raise CheckpointError(
            f"{where} needs scaled embeddings, which are not supported",
            why=f"`scale_embedding` is {quoted(config['scale_embedding'])}; expected false, "
            "as in every published Whisper model",
        )
    if config.get("quantization_config") is not None:
        raise CheckpointError(
            f"{where} describes a quantized checkpoint, which is not supported",
            why="it has a `quantization_config`; only float32, float16 and bfloat16 weights can be read",
            hint="give the original checkpoint, from before quantization",
        )


def _hint_for(folder: Path) -> str:
    below = sorted(
        path.parent for path in [*folder.glob("*/config.json"), *folder.glob(_HUB_CACHE_CONFIGS)]
    )
    if below:
        more = f", or another of the {len(below)} checkpoints in it" if len(below) > 1 else ""
        return f"give the checkpoint folder inside it: `{below[0]}`{more}"
    pickled = sorted(path.name for path in folder.glob("*.pt"))
    if pickled:
        return f"give the file in the folder: `{folder / pickled[0]}`"
    return "give the folder that holds config.json, tokenizer.json and model.safetensors"
