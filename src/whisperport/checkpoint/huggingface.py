"""Load a checkpoint folder as transformers writes it."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from whisperport.checkpoint.checkpoint import Checkpoint, Source
from whisperport.checkpoint.config import is_tied, read_config
from whisperport.checkpoint.encoder_positions import sinusoids
from whisperport.checkpoint.generation_settings import read_generation
from whisperport.checkpoint.json_file import read_json_object
from whisperport.checkpoint.names import from_huggingface, to_huggingface, unwrapped
from whisperport.checkpoint.other_forms import reject_other_forms
from whisperport.checkpoint.sizes import quoted, shortened
from whisperport.checkpoint.tensor_check import check_tensors, reject_halves
from whisperport.checkpoint.tokenizer_files import read_tokenizer
from whisperport.checkpoint.weight_files import read_weights
from whisperport.dims import Dims
from whisperport.errors import CheckpointError
from whisperport.text.tokenizer import Tokenizer

_POSITIONS = "encoder.positional_embedding"
_EMBEDDING = "decoder.token_embedding.weight"
_PROJECTION = "proj_out.weight"


def load_folder(folder: Path, *, name: str, revision: str = "") -> Checkpoint:
    """Sizes, weights, tokenizer and settings of one folder; `name` is what the user called it.

    Raises CheckpointError or TokenizerError: see `load_checkpoint`.
    """
    _reject_adapter(folder)
    reject_other_forms(folder)
    config, dims = read_config(folder)
    stored = read_weights(folder)
    weights = _canonical(stored.tensors, config, dims, str(folder))
    tokenizer = read_tokenizer(folder, dims.n_vocab)
    generation, warnings = read_generation(folder, config, tokenizer.ids, dims)
    # Refuses one checkpoint's tokenizer beside another's settings: here, not when it first decodes.
    Tokenizer.from_json(tokenizer.json.decode(), generation, name=f"the tokenizer in `{folder}`")
    return Checkpoint(
        dims=dims,
        generation=generation,
        weights=MappingProxyType(weights),
        tokenizer_json=tokenizer.json,
        source=Source(
            kind="huggingface",
            name=name,
            revision=revision,
            sha256=MappingProxyType(dict(stored.sha256)),
        ),
        warnings=tokenizer.warnings + warnings,
    )


def check_texts(folder: Path) -> None:
    """Raises CheckpointError where the small files alone say that this is no Whisper to be loaded."""
    _reject_adapter(folder)
    read_config(folder)


def _reject_adapter(folder: Path) -> None:
    if not (folder / "adapter_config.json").is_file():
        return
    adapter = read_json_object(folder / "adapter_config.json")
    raise CheckpointError(
        f"`{folder}` holds a PEFT adapter, not a whole checkpoint",
        why=f"its adapter_config.json is of type {quoted(adapter.get('peft_type'))}, for the base "
        f"model {quoted(adapter.get('base_model_name_or_path'))}",
        hint="merge first: `PeftModel.merge_and_unload()`, then `save_pretrained` to a new folder",
    )


def _canonical(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], dims: Dims, where: str
) -> dict[str, Tensor]:
    """All of the model's tensors by openai-whisper's names, checked."""
    lora = next((name for name in tensors if ".lora_" in name), None)
    if lora is not None:
        raise CheckpointError(
            f"`{where}` holds LoRA weights beside the model's",
            why=f"one is `{shortened(lora)}`",
            hint="merge first: `PeftModel.merge_and_unload()`, then `save_pretrained`",
        )
    weights: dict[str, Tensor] = {}
    unexpected: list[str] = []
    tensors = unwrapped(tensors, own="model.")
    for name, tensor in tensors.items():
        if name == _PROJECTION:
            continue
        ours = from_huggingface(name)
        # A name may come with and without `model.`; the second is then one too many.
        if ours is None or ours in weights:
            unexpected.append(name)
        else:
            weights[ours] = tensor
    reject_halves(weights, where=where)
    if _EMBEDDING not in weights and _PROJECTION in tensors and is_tied(config):
        weights[_EMBEDDING] = tensors[_PROJECTION]  # one of the two names was kept, and is enough
    if _POSITIONS not in weights and dims.n_audio_state % 2 == 0 and dims.n_audio_state >= 4:
        weights[_POSITIONS] = sinusoids(dims.n_audio_ctx, dims.n_audio_state)
    check_tensors(weights, dims, where=where, unexpected=unexpected, spell=to_huggingface)
    _check_projection(tensors.get(_PROJECTION), weights[_EMBEDDING], is_tied(config), where)
    return weights


def _check_projection(projection: Tensor | None, embedding: Tensor, tied: bool, where: str) -> None:
    """The model here has one matrix for both ends of the decoder, as every published one has."""
    if projection is None and tied:
        return
    if projection is not None and torch.equal(projection.float(), embedding.float()):
        return
    why = "it is missing" if projection is None else "its numbers differ from the embedding's"
    raise CheckpointError(
        f"`{where}` has an output projection of its own, which this package cannot run",
        why=f"expected `{_PROJECTION}` to be equal to the token embedding; {why}"
        + ("" if tied else ", and config.json says `tie_word_embeddings` is false"),
        hint="tie the two again before the last steps of training (`model.tie_weights()`)",
    )
