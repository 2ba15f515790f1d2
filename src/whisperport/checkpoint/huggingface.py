"""Load a checkpoint folder in transformers' format."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from whisperport.checkpoint.checkpoint import Checkpoint, Source, checkpoint_of_folder
from whisperport.checkpoint.config import is_tied, read_config
from whisperport.checkpoint.encoder_positions import sinusoids
from whisperport.checkpoint.generation_settings import read_generation
from whisperport.checkpoint.json_file import read_json_object
from whisperport.checkpoint.names import from_huggingface, strip_wrapper_prefix, to_huggingface
from whisperport.checkpoint.other_forms import reject_other_forms
from whisperport.checkpoint.sizes import quoted, shorten
from whisperport.checkpoint.tensor_check import check_tensors, reject_incomplete_model
from whisperport.checkpoint.tokenizer_files import read_tokenizer
from whisperport.checkpoint.weight_files import read_weights
from whisperport.errors import CheckpointError
from whisperport.program.dims import Dims

_POSITIONS = "encoder.positional_embedding"
_EMBEDDING = "decoder.token_embedding.weight"
_PROJECTION = "proj_out.weight"


def load_folder(folder: Path, *, name: str, revision: str = "") -> Checkpoint:
    """Load a checkpoint from a folder.

    Args:
        folder: the folder.
        name: the name that the user gave, recorded as the source.
        revision: commit on the hub; empty: none.

    Raises:
        CheckpointError, TokenizerError: see `load_checkpoint`.
    """
    _reject_adapter(folder)
    reject_other_forms(folder)
    config, dims = read_config(folder)
    stored = read_weights(folder)
    weights = _openai_named(stored.tensors, config, dims, str(folder))
    tokenizer = read_tokenizer(folder, dims.n_vocab)
    generation, warnings = read_generation(folder, config, tokenizer.ids, dims)
    source = Source(
        kind="huggingface",
        name=name,
        revision=revision,
        sha256=MappingProxyType(dict(stored.sha256)),
    )
    return checkpoint_of_folder(folder, dims, weights, tokenizer, generation, source, warnings)


def check_config_files(folder: Path) -> None:
    """Check the small files of a checkpoint folder, before its weights are downloaded.

    Raises:
        CheckpointError: they show that the checkpoint is not supported.
    """
    _reject_adapter(folder)
    read_config(folder)


def _reject_adapter(folder: Path) -> None:
    if not (folder / "adapter_config.json").is_file():
        return
    adapter = read_json_object(folder / "adapter_config.json")
    raise CheckpointError(
        f"`{folder}` holds a PEFT adapter, not a complete checkpoint",
        why=f"its adapter_config.json is of type {quoted(adapter.get('peft_type'))}, for the base "
        f"model {quoted(adapter.get('base_model_name_or_path'))}",
        hint="merge it with the base model: `PeftModel.merge_and_unload()`, then `save_pretrained` to a "
        "new folder",
    )


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
    tensors = strip_wrapper_prefix(tensors, own="model.")
    for name, tensor in tensors.items():
        if name == _PROJECTION:
            continue
        openai_name = from_huggingface(name)
        # If a name occurs with and without `model.`, the second one is unexpected.
        if openai_name is None or openai_name in weights:
            unexpected.append(name)
        else:
            weights[openai_name] = tensor
    reject_incomplete_model(weights, where=where)
    if _EMBEDDING not in weights and _PROJECTION in tensors and is_tied(config):
        weights[_EMBEDDING] = tensors[_PROJECTION]  # the file has only one of the two tied tensors
    if _POSITIONS not in weights and dims.n_audio_state % 2 == 0 and dims.n_audio_state >= 4:
        weights[_POSITIONS] = sinusoids(dims.n_audio_ctx, dims.n_audio_state)
    check_tensors(weights, dims, where=where, unexpected=unexpected, original_name=to_huggingface)
    _check_projection(tensors.get(_PROJECTION), weights[_EMBEDDING], is_tied(config), where)
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
        why=f"expected `{_PROJECTION}` to be equal to the token embedding; {why}"
        + ("" if tied else ", and `tie_word_embeddings` in config.json is false"),
        hint="tie the two tensors with `model.tie_weights()` before the last steps of training",
    )
