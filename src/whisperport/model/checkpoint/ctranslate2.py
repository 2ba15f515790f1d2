"""Load a folder of CTranslate2 (faster-whisper): model.bin, config.json, vocabulary, often tokenizer.json.

CTranslate2 fuses the weights of attention: query, key and value of self-attention, key and value of
cross-attention. The bias that it adds for the key is zero. A weight of integers has a `weight_scale`: one
number per row (int8) or in all (int16), by which the integers are divided.
Source: OpenNMT/CTranslate2@0d8bcd3, python/ctranslate2/converters/transformers.py and specs/model_spec.py.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from whisperport.errors import CheckpointError, TokenizerError
from whisperport.model.checkpoint.binary_reader import HINT
from whisperport.model.checkpoint.checkpoint import (
    Checkpoint,
    Source,
    checkpoint_of_folder,
    quantization_warning,
)
from whisperport.model.checkpoint.ctranslate2_file import Variables, read_model_bin
from whisperport.model.checkpoint.generation_settings import generation_from
from whisperport.model.checkpoint.names import KEY_BIAS
from whisperport.model.checkpoint.tensor_check import check_tensors, dims_of_tensors
from whisperport.model.checkpoint.tokenizer_files import StoredTokenizer, read_tokenizer
from whisperport.model.checkpoint.weight_files import find_weights
from whisperport.program.bundle.folder import file_sha256
from whisperport.program.dims import LARGEST, Dims
from whisperport.program.untrusted import quoted, read_json_object, shorten

MODEL_BIN = "model.bin"

# Name in a layer, without `weight` or `bias` -> openai-whisper's modules that are fused in it.
LINEARS = {
    "self_attention/linear_0": ("attn.query", "attn.key", "attn.value"),
    "self_attention/linear_1": ("attn.out",),
    "attention/linear_0": ("cross_attn.query",),
    "attention/linear_1": ("cross_attn.key", "cross_attn.value"),
    "attention/linear_2": ("cross_attn.out",),
    "ffn/linear_0": ("mlp.0",),
    "ffn/linear_1": ("mlp.2",),
    "self_attention/layer_norm": ("attn_ln",),
    "attention/layer_norm": ("cross_attn_ln",),
    "ffn/layer_norm": ("mlp_ln",),
}
TOP = {
    "encoder/conv1": "encoder.conv1",
    "encoder/conv2": "encoder.conv2",
    "encoder/layer_norm": "encoder.ln_post",
    "decoder/embeddings": "decoder.token_embedding",
    "decoder/layer_norm": "decoder.ln",
}
POSITIONS = "position_encodings/encodings"
_KINDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}
_LAYER = re.compile(r"(encoder|decoder)/layer_(0|[1-9]\d{0,3})/(.+)")
EMBEDDING, PROJECTION = "decoder/embeddings/weight", "decoder/projection/weight"
# Numbers that choose the architecture. 3 is GELU. Any other number that is not named must be 0: off.
_ARCHITECTURE = {"decoder/activation": 3, "decoder/pre_norm": 1}
_WITHOUT_EFFECT = {
    "decoder/alignment_heads",
    "decoder/alignment_layer",
}  # config.json has the heads
_HEADS = ("encoder/num_heads", "decoder/num_heads")
_ENGLISH_ONLY = 51864  # number of tokens
_MAX_VOCABULARY_BYTES = 64 << 20


def is_ctranslate2(folder: Path) -> bool:
    """Return whether a folder holds a model of CTranslate2 and no weights in transformers' format."""
    return (folder / MODEL_BIN).is_file() and find_weights(folder) is None


def load_ctranslate2(folder: Path, *, name: str) -> Checkpoint:
    """Load a folder; `name` is the name that the user gave.

    Raises:
        CheckpointError, TokenizerError: see `load_checkpoint`.
    """
    path = folder / MODEL_BIN
    try:
        variables = read_model_bin(path)
    except OSError as error:
        raise CheckpointError(f"cannot read `{path}`", why=str(error), hint=HINT) from error
    numbers = _numbers(variables)
    _check_architecture(numbers, folder)
    tensors, quantized = _dequantized(variables, numbers, folder)
    weights, unexpected = _openai_named(tensors)
    _check_key_biases(weights, folder)
    dims = _dims(weights, numbers, folder)
    check_tensors(weights, dims, where=str(folder), unexpected=unexpected)
    tokenizer = read_tokenizer(folder, dims.n_vocab)
    _check_vocabulary(folder, tokenizer)
    generation, warnings = generation_from(
        *_settings(folder, tokenizer.ids, dims), tokenizer.ids, dims, file="config.json"
    )
    if quantized:
        warnings = (*warnings, quantization_warning(quantized))
    source = Source(
        kind="ctranslate2",
        name=name,
        sha256=MappingProxyType({MODEL_BIN: file_sha256(path)}),
        quantized=quantized,
    )
    return checkpoint_of_folder(folder, dims, weights, tokenizer, generation, source, warnings)


def read_weights(folder: Path) -> Mapping[str, Tensor]:
    """Return the weights in a folder under openai-whisper's names, without a check of their sizes.

    Whisper's keys have no bias: that of a key is among them only if it is not 0.

    Raises:
        CheckpointError: `model.bin` is damaged, or is not Whisper's.
        OSError: it cannot be read.
    """
    variables = read_model_bin(folder / MODEL_BIN)
    tensors, _ = _dequantized(variables, _numbers(variables), folder)
    weights, _ = _openai_named(tensors)
    return weights


def _numbers(variables: Variables) -> dict[str, int]:
    return {
        name: int(tensor)
        for name, tensor in variables.by_any_name.items()
        if tensor.dim() == 0 and not tensor.dtype.is_floating_point
    }


def _check_architecture(numbers: Mapping[str, int], folder: Path) -> None:
    for name, number in numbers.items():
        expected = _ARCHITECTURE.get(name, 0)
        if name not in _HEADS and name not in _WITHOUT_EFFECT and number != expected:
            # The two that only matter with a switch that is off.
            if name.endswith(("alibi_use_positive_positions", "scale_alibi")):
                continue
            raise CheckpointError(
                f"`{folder}` needs an architecture that is not supported",
                why=f"`{shorten(name)}` is {number}; expected {expected}, as in Whisper",
                hint="give a Whisper model converted by CTranslate2's own converter",
            )
    absent = [name for name in (*_HEADS, *_ARCHITECTURE) if name not in numbers]
    if absent:
        raise CheckpointError(
            f"`{folder}` is not a complete model of CTranslate2",
            why=f"model.bin has no {', '.join(absent)}",
            hint=HINT,
        )


def _dequantized(
    variables: Variables, numbers: Mapping[str, int], folder: Path
) -> tuple[dict[str, Tensor], str]:
    """Return the float tensors, and the dtypes that weights were quantized to; empty: none were."""
    what = f"cannot use `{MODEL_BIN}` in `{folder}`"
    tensors: dict[str, Tensor] = {}
    kinds = set()
    stored = variables.by_any_name
    is_alias = variables.aliases.get(PROJECTION) == EMBEDDING
    for name, tensor in stored.items():
        if name in numbers or name.endswith("_scale") or (name == PROJECTION and is_alias):
            continue
        scale = stored.get(f"{name}_scale")
        if tensor.dtype.is_floating_point != (scale is None):
            why = (
                f"`{shorten(name)}` of {_dtype(tensor)} has {'no' if scale is None else 'a'} scale"
            )
            raise CheckpointError(what, why=why, hint=HINT)
        if scale is not None:
            if (
                scale.dtype != torch.float32
                or scale.dim() > 1
                or scale.numel() not in (1, len(tensor))
            ):
                why = f"the scale of `{shorten(name)}` is of {_dtype(scale)} {tuple(scale.shape)}"
                raise CheckpointError(what, why=why, hint=HINT)
            kinds.add(_dtype(tensor))
            tensor = tensor.float().div_(scale.reshape(-1, *[1] * (tensor.dim() - 1)))
        tensors[name] = tensor
    projection = tensors.pop(PROJECTION, None)
    if projection is None and not is_alias:
        raise CheckpointError(
            f"`{folder}` has no output projection",
            why=f"model.bin lacks `{PROJECTION}`, which is another name of `{EMBEDDING}` in a right file",
            hint="convert the original checkpoint again",
        )
    if projection is not None and not (
        EMBEDDING in tensors and torch.equal(projection.float(), tensors[EMBEDDING].float())
    ):
        raise CheckpointError(
            f"`{folder}` has a separate output projection, which is not supported",
            why=f"`{PROJECTION}` differs from the token embedding",
            hint="tie the two tensors of the original checkpoint: `model.tie_weights()`",
        )
    return tensors, ", ".join(sorted(kinds))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _openai_named(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors under openai-whisper's names, and the names that are not known."""
    weights: dict[str, Tensor] = {}
    unexpected = []
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition("/")
        kind = _KINDS.get(last, "")
        if name.endswith(POSITIONS) and name.count("/") == 2:
            weights[f"{name.partition('/')[0]}.positional_embedding"] = tensor
        elif kind and stem in TOP:
            weights[f"{TOP[stem]}.{kind}"] = tensor
        elif kind and (match := _LAYER.fullmatch(stem)) and match[3] in LINEARS:
            prefix = f"{match[1]}.blocks.{match[2]}"
            modules = LINEARS[match[3]]
            if len(tensor) % len(modules):
                unexpected.append(f"{name} of shape {tuple(tensor.shape)}")
                continue
            for module, part in zip(modules, tensor.chunk(len(modules)), strict=True):
                if f"{module}.{kind}".endswith(KEY_BIAS) and not part.any():
                    continue
                weights[f"{prefix}.{module}.{kind}"] = part
        else:
            unexpected.append(name)
    return weights, unexpected


def _check_key_biases(weights: Mapping[str, Tensor], folder: Path) -> None:
    for name in weights:
        if name.endswith(KEY_BIAS):
            raise CheckpointError(
                f"`{folder}` is not a conversion of a Whisper model",
                why=f"`{name}` is not zero; Whisper's keys have no bias",
                hint="give the original checkpoint",
            )


def _dims(weights: Mapping[str, Tensor], numbers: Mapping[str, int], folder: Path) -> Dims:
    """Return the sizes: shapes of tensors, numbers of layers, and the heads that the file states."""
    what = f"the variables in `{folder / MODEL_BIN}` have impossible sizes"
    stated = numbers["encoder/num_heads"], numbers["decoder/num_heads"]
    return dims_of_tensors(
        weights,
        lambda _width: stated,
        what=what,
        error=lambda why: CheckpointError(what, why=why, hint=HINT),
    )


def _settings(
    folder: Path, ids: Mapping[str, int], dims: Dims
) -> tuple[dict[str, object] | None, dict[str, object]]:
    """Return the settings under transformers' names, and {} in place of transformers' config.json."""
    path = folder / "config.json"
    if not path.is_file():
        return None, {}
    own = read_json_object(path)
    stated: dict[str, object] = {"is_multilingual": dims.n_vocab != _ENGLISH_ONLY}
    for theirs, key in (
        ("suppress_ids", "suppress_tokens"),
        ("suppress_ids_begin", "begin_suppress_tokens"),
        ("alignment_heads", "alignment_heads"),
    ):
        if own.get(theirs) is not None:
            stated[key] = own[theirs]
    languages = own.get("lang_ids") or []
    if not isinstance(languages, list) or not all(type(number) is int for number in languages):
        raise CheckpointError(
            f"`{path}` cannot be used",
            why=f"`lang_ids` is {quoted(languages)}; expected a list of token ids",
            hint="correct or remove it",
        )
    texts = {number: text for text, number in ids.items()}
    unknown = [number for number in languages if number not in texts]
    if unknown:
        raise CheckpointError(
            f"`{path}` cannot be used",
            why=f"`lang_ids` lists {quoted(unknown[0])}, which the tokenizer does not have",
            hint="correct or remove it",
        )
    stated["lang_to_id"] = {texts[number]: number for number in languages}
    return stated, {}


def _check_vocabulary(folder: Path, tokenizer: StoredTokenizer) -> None:
    """Check that vocabulary.json or vocabulary.txt lists the text tokens of the tokenizer.

    Raises:
        TokenizerError: it cannot be read, or lists others. It has no merges to make a tokenizer of.
    """
    path = next(
        (p for p in map(folder.joinpath, ("vocabulary.json", "vocabulary.txt")) if p.is_file()),
        None,
    )
    if path is None:
        return
    what = f"cannot use `{path.name}` in `{folder}`"
    hint = "copy tokenizer.json from the original checkpoint into the folder"
    try:
        if path.stat().st_size > _MAX_VOCABULARY_BYTES:
            raise TokenizerError(
                what, why=f"it has more than {_MAX_VOCABULARY_BYTES} bytes", hint=hint
            )
        text = path.read_text(encoding="utf-8")
        words = json.loads(text) if path.suffix == ".json" else text.split("\n")
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(what, why=shorten(str(error)), hint=hint) from error
    if not isinstance(words, list):
        raise TokenizerError(what, why="it is not a list of tokens", hint=hint)
    last = tokenizer.ids["<|endoftext|>"]
    for text, number in tokenizer.ids.items():
        if number <= min(last, LARGEST["n_vocab"]) and words[number : number + 1] != [text]:
            raise TokenizerError(
                what,
                why=f"its token {number} is {quoted(words[number : number + 1])}; the tokenizer has "
                f"{quoted(text)}",
                hint=hint,
            )
