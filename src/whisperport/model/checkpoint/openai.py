"""Load a `.pt` file in openai-whisper's format: {"dims": {...}, "model_state_dict": {...}}."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from whisperport.errors import CheckpointError
from whisperport.model.checkpoint.checkpoint import Checkpoint, Source
from whisperport.model.checkpoint.names import strip_wrapper_prefix
from whisperport.model.checkpoint.openai_releases import alignment_heads
from whisperport.model.checkpoint.pickled_file import plain_tensors, read_pickled
from whisperport.model.checkpoint.tensor_check import (
    check_tensors,
    dims_of_tensors,
    reject_incomplete_model,
)
from whisperport.model.checkpoint.tokenizer_files import default_tokenizer
from whisperport.program.bundle.folder import file_sha256
from whisperport.program.dims import Dims
from whisperport.program.untrusted import checked_dims, quoted
from whisperport.speech.text.vocabulary import openai_generation

_DIMS_FIELDS = (
    "n_mels",
    "n_audio_ctx",
    "n_audio_state",
    "n_audio_head",
    "n_audio_layer",
    "n_vocab",
    "n_text_ctx",
    "n_text_state",
    "n_text_head",
    "n_text_layer",
)
_WIDTHS = (384, 512, 768, 1024, 1280)  # of tiny to large; each has heads of width 64
_HEAD_WIDTH = 64
_HOW_TO_SAVE = (
    "save it in openai-whisper's format: "
    '{"dims": vars(model.dims), "model_state_dict": model.state_dict()}'
)
_STATES = (
    "model_state_dict",
    "state_dict",
    "model",
)  # keys of openai-whisper, Lightning, others
# Buffers that some fine-tuned checkpoints contain: a constant, and the alignment heads of their base.
_BUFFERS = ("decoder.mask", "alignment_heads")


def load_pt(path: Path, *, name: str) -> Checkpoint:
    """Load a `.pt` file; `name` is the name that the user gave.

    Raises:
        CheckpointError, TokenizerError: see `load_checkpoint`.
    """
    data = read_pickled(path)
    if not isinstance(data, dict):
        raise CheckpointError(
            f"`{path}` is not a Whisper checkpoint",
            why=f"it holds a {type(data).__name__}; expected `dims` and `model_state_dict`",
            hint="give a file that openai-whisper can load, or a Hugging Face folder",
        )
    weights = _weights(data, path)
    _reject_huggingface_names(weights, path)
    reject_incomplete_model(weights, where=str(path))
    warnings: tuple[str, ...] = ()
    if "dims" in data:
        dims = _dims_from_file(data["dims"], path)
    else:
        dims = _inferred_dims(weights, path)
        warnings = (
            f"the file has no `dims`: the sizes are inferred from its tensors, with a head width of "
            f"{_HEAD_WIDTH} as in every OpenAI model",
        )
    check_tensors(weights, dims, where=str(path))
    tokenizer = default_tokenizer(dims.n_vocab, where=str(path))
    digest = file_sha256(path)
    heads = alignment_heads(digest, n_layers=dims.n_text_layer, n_heads=dims.n_text_head)
    return Checkpoint(
        dims=dims,
        generation=replace(openai_generation(dims.n_vocab), alignment_heads=heads),
        weights=MappingProxyType(weights),
        tokenizer_json=tokenizer.json,
        source=Source(kind="openai", name=name, sha256=MappingProxyType({path.name: digest})),
        warnings=warnings,  # without the tokenizer's: no .pt file has one, and OpenAI's is right
    )


def _weights(data: Mapping[Any, Any], path: Path) -> dict[str, Tensor]:
    """Return the state_dict in a file, or all of its contents if they are one."""
    key = next((key for key in _STATES if key in data), None)
    state = {k: v for k, v in data.items() if k != "dims"} if key is None else data[key]
    if not isinstance(state, dict):
        raise CheckpointError(
            f"`{path}` is not a Whisper checkpoint",
            why=f"its `{key}` is {quoted(type(state).__name__)}, not a mapping",
            hint=_HOW_TO_SAVE,
        )
    state = {k: v for k, v in state.items() if not (isinstance(k, str) and k.endswith(_BUFFERS))}
    return strip_wrapper_prefix(plain_tensors(state, where=str(path)))


def _dims_from_file(stated: Any, path: Path) -> Dims:
    what = f"`dims` in `{path}` states impossible sizes"
    if not isinstance(stated, dict) or set(stated) != set(_DIMS_FIELDS):
        raise CheckpointError(
            what, why=f"expected the ten sizes {', '.join(_DIMS_FIELDS)}; found {quoted(stated)}"
        )
    sizes = dict(stated)
    for side in ("audio", "text"):  # constant in openai-whisper
        width = sizes[f"n_{side}_state"]
        sizes[f"n_{side}_ffn"] = 4 * width if isinstance(width, int) else width
    return checked_dims(sizes, what=what, keys={})


def _inferred_dims(weights: Mapping[str, Tensor], path: Path) -> Dims:
    """Infer the sizes from the shapes of the tensors; this is possible only for OpenAI's five widths."""

    def heads(width: int) -> tuple[int, int]:
        if width not in _WIDTHS:
            raise CheckpointError(
                f"cannot determine how many attention heads the model in `{path}` has",
                why=f"it has no `dims`, and its width {width} is not one of OpenAI's widths {_WIDTHS}",
                hint=_HOW_TO_SAVE,
            )
        return width // _HEAD_WIDTH, width // _HEAD_WIDTH

    return dims_of_tensors(
        weights,
        heads,
        what=f"the tensors in `{path}` have impossible sizes",
        error=lambda why: CheckpointError(
            f"`{path}` is not a Whisper checkpoint",
            why=f"it has no `dims`, and {why}",
            hint=_HOW_TO_SAVE,
        ),
    )


def _reject_huggingface_names(weights: Mapping[str, Tensor], path: Path) -> None:
    if any(".layers." in name or name.endswith("embed_tokens.weight") for name in weights):
        raise CheckpointError(
            f"`{path}` holds a Hugging Face state_dict, not an openai-whisper one",
            why="its tensors have names such as `model.encoder.layers.0.fc1.weight`",
            hint="give the folder that transformers' `save_pretrained` writes, with its config.json",
        )
