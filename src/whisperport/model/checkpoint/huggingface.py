"""Load a checkpoint folder in transformers' format.

`read_config` reads the sizes in `config.json`, and rejects architectures that are not supported;
`sinusoids` computes the encoder's positional embedding, for files that do not contain it.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from whisperport.errors import CheckpointError
from whisperport.model.checkpoint.checkpoint import Checkpoint, Source, checkpoint_of_folder
from whisperport.model.checkpoint.generation_settings import read_generation
from whisperport.model.checkpoint.names import (
    EMBEDDING,
    PROJECTION,
    from_huggingface,
    strip_wrapper_prefix,
    to_huggingface,
)
from whisperport.model.checkpoint.other_forms import reject_other_forms
from whisperport.model.checkpoint.tensor_check import (
    check_tensors,
    expected_shapes,
    reject_incomplete_model,
)
from whisperport.model.checkpoint.tokenizer_files import read_tokenizer
from whisperport.model.checkpoint.weight_files import read_weights
from whisperport.program.adapter_settings import is_adapter, read_adapter
from whisperport.program.dims import Dims
from whisperport.program.untrusted import checked_dims, quoted, read_json_object, shorten

_POSITIONS = "encoder.positional_embedding"


def load_folder(folder: Path, *, name: str, revision: str = "") -> Checkpoint:
    """Load a checkpoint from a folder.

    Args:
        folder: the folder.
        name: the name that the user gave, recorded as the source.
        revision: commit on the hub; empty: none.

    Raises:
        CheckpointError, TokenizerError: see `load_checkpoint`.
    """
    reject_other_forms(folder)
    config, dims = read_config(folder)
    stored = read_weights(folder)
    tensors = strip_wrapper_prefix(stored.tensors, own="model.")
    tensors, growth = with_multiplied_factors(tensors, dims, where=str(folder))
    weights = _openai_named(tensors, config, dims, str(folder))
    tokenizer = read_tokenizer(folder, dims.n_vocab)
    generation, warnings = read_generation(folder, config, tokenizer.ids, dims)
    source = Source(
        kind="huggingface",
        name=name,
        revision=revision,
        sha256=MappingProxyType(dict(stored.sha256)),
    )
    warnings = (*growth, *warnings)
    return checkpoint_of_folder(folder, dims, weights, tokenizer, generation, source, warnings)


def check_config_files(folder: Path) -> None:
    """Check the small files of a checkpoint folder, before its weights are downloaded.

    Raises:
        CheckpointError: they show that the checkpoint is not supported.
    """
    if is_adapter(folder):
        read_adapter(folder)
    else:
        read_config(folder)


def _openai_named(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], dims: Dims, where: str
) -> dict[str, Tensor]:
    """Return all tensors of the model under openai-whisper's names, after checking them."""
    lora = next((name for name in tensors if ".lora_" in name), None)
    if lora is not None:
        raise CheckpointError(
            f"`{where}` holds LoRA weights beside the model's weights",
            why=f"one is `{shorten(lora)}`",
            hint="merge them into the model: `PeftModel.merge_and_unload()`, then `save_pretrained`",
        )
    weights: dict[str, Tensor] = {}
    unexpected: list[str] = []
    for name, tensor in tensors.items():
        if name == PROJECTION:
            continue
        openai_name = from_huggingface(name)
        # If a name occurs with and without `model.`, the second one is unexpected.
        if openai_name is None or openai_name in weights:
            unexpected.append(name)
        else:
            weights[openai_name] = tensor
    reject_incomplete_model(weights, where=where)
    if EMBEDDING not in weights and PROJECTION in tensors and is_tied(config):
        weights[EMBEDDING] = tensors[PROJECTION]  # the file has only one of the two tied tensors
    if _POSITIONS not in weights and dims.n_audio_state % 2 == 0 and dims.n_audio_state >= 4:
        weights[_POSITIONS] = sinusoids(dims.n_audio_ctx, dims.n_audio_state)
    check_tensors(weights, dims, where=where, unexpected=unexpected, original_name=to_huggingface)
    _check_projection(tensors.get(PROJECTION), weights[EMBEDDING], is_tied(config), where)
    return weights


def _check_projection(projection: Tensor | None, embedding: Tensor, tied: bool, where: str) -> None:
    """Check that the output projection equals the token embedding, as in every published model.

    Raises:
        CheckpointError: it does not.
    """
    if projection is None and tied:
        return
    if projection is not None and torch.equal(projection.float(), embedding.float()):
        return
    why = "it is missing" if projection is None else "its values differ from the embedding's"
    raise CheckpointError(
        f"`{where}` has a separate output projection, which is not supported",
        why=f"expected `{PROJECTION}` to be equal to the token embedding; {why}"
        + ("" if tied else ", and `tie_word_embeddings` in config.json is false"),
        hint="tie the two tensors with `model.tie_weights()` before the last steps of training",
    )


def sinusoids(length: int, width: int) -> Tensor:
    """Return sinusoidal positions: (length, width) float32.

    The first half of the columns are sines, the second half cosines. Their periods form a geometric
    sequence from 2π to 20000π positions.

    Args:
        length: number of positions.
        width: number of columns; even, at least 4.

    Source: openai-whisper's `model.py`, where the encoder has them as a constant buffer.
    """
    half = width // 2
    step = math.log(10_000) / (half - 1)
    angles = torch.arange(length)[:, None] * torch.exp(-step * torch.arange(half))[None]
    return torch.cat([angles.sin(), angles.cos()], dim=1)


# Field of `Dims` -> key of config.json.
CONFIG_KEYS = {
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
    missing = sorted({word for word in CONFIG_KEYS.values() if word not in config})
    if missing:
        raise CheckpointError(
            f"{where} does not state every size",
            why=f"missing: {', '.join(missing)}",
            hint="it is a conversion for MLX: give the original checkpoint"
            if "n_audio_state" in config
            else "save the checkpoint again with transformers' `save_pretrained`",
        )
    sizes = {field: config[word] for field, word in CONFIG_KEYS.items()}
    return config, checked_dims(sizes, what=f"{where} states impossible sizes", keys=CONFIG_KEYS)


def is_tied(config: Mapping[str, Any]) -> bool:
    """Return whether the output projection is tied to the token embedding; True by default."""
    return config.get("tie_word_embeddings") is not False


def _reject_other_architectures(config: Mapping[str, Any], where: str) -> None:
    if config.get("model_type") not in ("whisper", "lite-whisper"):
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
        rest = f", or another of the {len(below)} checkpoints in it" if len(below) > 1 else ""
        return f"give the checkpoint folder inside it: `{below[0]}`{rest}"
    pickled = sorted(path.name for path in folder.glob("*.pt"))
    if pickled:
        return f"give the file in the folder: `{folder / pickled[0]}`"
    return "give the folder that holds config.json, tokenizer.json and model.safetensors"


def with_multiplied_factors(
    tensors: Mapping[str, Tensor], dims: Dims, *, where: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the tensors with a matrix in place of each pair of factors, and a warning if there are any.

    lite-whisper's encoder computes a linear layer as (x @ weight1) @ weight2 + bias, with weight1 (in, r)
    and weight2 (r, out). Multiplied, they are a matrix as in every other checkpoint, so that all programs
    can be made from it. It is larger than the factors: the encoder is as large as that of the original
    model again. The layer of the keys has a bias as well, unlike Whisper's. It adds the same number to all
    scores of a query, which the softmax cancels, and is left out.
    Source: efeslab/LiteASR@da5be85, src/lite_whisper/modeling_lite_whisper.py

    Args:
        tensors: transformers' name -> tensor.
        dims: sizes of the model.
        where: the checkpoint, for the error.

    Raises:
        CheckpointError: two factors do not give a matrix of the size that the model has there.
    """
    shapes = expected_shapes(dims)
    dense = dict(tensors)
    before = after = count = 0
    for name, first in tensors.items():
        module = name.removesuffix(".weight1")
        second = tensors.get(f"{module}.weight2")
        if module == name or second is None or f"{module}.weight" in tensors:
            continue  # a factor that is left is reported as unexpected
        shape = shapes.get(from_huggingface(f"{module}.weight") or "")
        if (*second.shape[1:], *first.shape[:1]) != shape or first.shape[1:] != second.shape[:1]:
            raise CheckpointError(
                f"the factors of a weight in `{where}` do not fit",
                why=f"those of {shorten(module)} are {tuple(first.shape)} and {tuple(second.shape)}; the "
                f"weight has the shape {shape}",
                hint="save the checkpoint again",
            )
        matrix = (first.float() @ second.float()).T.contiguous().to(first.dtype)
        dense[f"{module}.weight"] = matrix
        for surplus in ("weight1", "weight2", *(["bias"] if module.endswith(".k_proj") else [])):
            dense.pop(f"{module}.{surplus}", None)
        count, before, after = (
            count + 1,
            before + first.nbytes + second.nbytes,
            after + matrix.nbytes,
        )
    if not count:
        return dense, ()
    warning = (
        f"{count} weights are stored as two factors each; they are multiplied, and take {after >> 20} MiB "
        f"instead of {before >> 20} MiB"
    )
    return dense, (warning,)
