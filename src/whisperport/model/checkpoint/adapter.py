"""Merge a LoRA adapter of PEFT with its base, the checkpoint that it was trained on.

An adapter is a folder with adapter_config.json and adapter_model.safetensors. For a module with the weight
W (out, in, *kernel) the file has the factors A (r, in, *kernel) and B (out, r, *1). The merged weight is
W + scale * B A; scale is `lora_alpha` / r, or `lora_alpha` / sqrt(r) with `use_rslora`. With `use_dora`,
each row of the merged weight is then scaled to have the norm in `lora_magnitude_vector`. Modules and biases
that were trained completely replace those of the base. `target_modules` is not needed: the names in the
file state the modules. `fan_in_fan_out` has no effect on Whisper's modules, in PEFT as well.
Source: huggingface/peft@5d602fd, docs/source/developer_guides/checkpoint.md and src/peft/tuners/lora.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from whisperport.errors import CheckpointError
from whisperport.model.checkpoint.checkpoint import Checkpoint
from whisperport.model.checkpoint.names import (
    EMBEDDING,
    PROJECTION,
    from_huggingface,
    to_huggingface,
)
from whisperport.model.checkpoint.tensor_check import listing
from whisperport.model.checkpoint.untrusted import quoted, read_json_object
from whisperport.model.checkpoint.weight_files import read_tensors
from whisperport.program.bundle.folder import file_sha256

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # in order of preference

_MERGE = (
    "merge it with PEFT: `PeftModel.merge_and_unload()`, then `save_pretrained` to a new folder, and give "
    "that folder"
)
# Settings with which a sum of two matrices is not all that the adapter changes.
_OTHER_METHODS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
)
# Values of `init_lora_weights` that do not change the weights of the base when the training begins.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
_WRAPPERS = re.compile(r"\.(default|modules_to_save|base_layer)(?=\.|$)")  # added inside of names
_LORA = re.compile(r"(.+)\.(lora_[AB]\.weight|lora_B\.bias|lora_magnitude_vector)(?:\.weight)?")
_A, _B, _B_BIAS, _MAGNITUDE = (
    "lora_A.weight",
    "lora_B.weight",
    "lora_B.bias",
    "lora_magnitude_vector",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The settings of an adapter that matter for merging it.

    Attributes:
        folder: the adapter's folder.
        base: path, hub id or name of the base.
        base_revision: commit, branch or tag of the base on the hub; None: the default branch.
        ranks, alphas: name of a module, or its end -> r or `lora_alpha`; the name "" stands for all others.
        is_rank_stabilized: `use_rslora`.
        is_dora: `use_dora`.
        ties_weights: the output projection follows the token embedding (`ensure_weight_tying`).
    """

    folder: Path
    base: str
    base_revision: str | None
    ranks: Mapping[str, float]
    alphas: Mapping[str, float]
    is_rank_stabilized: bool
    is_dora: bool
    ties_weights: bool

    def scale(self, module: str) -> float:
        """Return the factor of B A for a module, by its name in transformers."""
        rank = self.rank(module)
        return _value(self.alphas, module) / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def rank(self, module: str) -> int:
        """Return r of a module, by its name in transformers."""
        return int(_value(self.ranks, module))


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter of PEFT."""
    return (folder / CONFIG).is_file()


def read_adapter(folder: Path) -> Adapter:
    """Read adapter_config.json.

    Raises:
        CheckpointError: it is damaged, or describes another method than LoRA and DoRA.
    """
    config = read_json_object(folder / CONFIG)
    method = config.get("peft_type")
    if method != "LORA":
        raise CheckpointError(
            f"`{folder}` holds an adapter of a method that is not supported",
            why=f"its {CONFIG} is of type {quoted(method)}; expected 'LORA'",
            hint=f"{_MERGE}; PEFT cannot merge methods that learn a prompt or a prefix",
        )
    variants = [key for key in _OTHER_METHODS if config.get(key)]
    if config.get("init_lora_weights") not in _PLAIN_INITS:
        variants.append("init_lora_weights")
    if variants:
        stated = ", ".join(f"`{key}` {quoted(config[key])}" for key in variants)
        raise CheckpointError(
            f"`{folder}` holds a variant of LoRA that is not supported",
            why=f"its {CONFIG} has {stated}",
            hint=_MERGE,
        )
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not base or not base.isprintable():
        raise _unusable(
            folder, f"`base_model_name_or_path` is {quoted(base)}", "a path or a hub id"
        )
    if not isinstance(revision, str | None):
        raise _unusable(folder, f"`revision` is {quoted(revision)}", "a name or null")
    return Adapter(
        folder=folder,
        base=base,
        base_revision=revision or None,
        ranks=_numbers(folder, config, "rank_pattern", "r", int),
        alphas=_numbers(folder, config, "alpha_pattern", "lora_alpha", int | float),
        is_rank_stabilized=config.get("use_rslora") is True,
        is_dora=config.get("use_dora") is True,
        ties_weights=config.get("ensure_weight_tying") is True,
    )


def merged(adapter: Adapter, base: Checkpoint, *, name: str, revision: str = "") -> Checkpoint:
    """Return the base with the adapter's changes. Tokenizer and settings are those of the base.

    Only the weights that change are new in memory. They have the dtype of the base and are computed in
    float32.

    Args:
        adapter: the adapter.
        base: the checkpoint that it was trained on.
        name: the name that the user gave, recorded as the source.
        revision: commit of the adapter on the hub; empty: none.

    Raises:
        CheckpointError: the adapter's tensors cannot be read, or do not fit the base. None is ignored.
    """
    path = next((adapter.folder / n for n in WEIGHTS if (adapter.folder / n).is_file()), None)
    if path is None:
        raise CheckpointError(
            f"no weights in the adapter `{adapter.folder}`",
            why=f"it has none of {', '.join(WEIGHTS)}",
            hint="save the adapter with PEFT's `save_pretrained`",
        )
    complete, changes, unknown = _sorted_by_kind(read_tensors(path))
    misfits = [*_faults(adapter, base.weights, complete, changes)]
    faults = [listing("unexpected", unknown), listing("missing or of another shape", misfits)]
    if any(faults) or not (complete or changes):
        raise CheckpointError(
            f"the adapter in `{adapter.folder}` does not fit its base, `{adapter.base}`",
            why="; ".join(filter(None, faults)) or f"{path.name} has no tensors",
            hint=f"check that it was trained on this base, or {_MERGE}",
        )
    weights = dict(base.weights)
    weights.update({n: t.to(weights[n].dtype) for n, t in complete.items() if n != PROJECTION})
    for weight, parts in changes.items():
        weights.update(_changed(adapter, weights, weight, parts))
    _check_tie(adapter, base, weights, complete)
    _check_finite(adapter, weights, {*complete, *changes} - {PROJECTION})
    digests = {file.name: file_sha256(file) for file in (adapter.folder / CONFIG, path)}
    source = replace(
        base.source,
        name=name,
        revision=revision,
        sha256=MappingProxyType({**base.source.sha256, **digests}),
    )
    return replace(base, weights=MappingProxyType(weights), source=source)


def _sorted_by_kind(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], list[str]]:
    """Return complete tensors, the parts of each changed weight, and the names of unknown tensors.

    The keys of the first two are openai-whisper's names.
    """
    complete: dict[str, Tensor] = {}
    changes: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for name, tensor in tensors.items():
        bare = _WRAPPERS.sub("", name.removeprefix("base_model.model."))
        match = _LORA.fullmatch(bare)
        module, part = match.groups() if match else (bare, bare)
        weight = from_huggingface(f"{module}.weight" if match else module)
        if match is None and module == PROJECTION:
            weight = PROJECTION
        if weight is None or (match and weight == EMBEDDING):
            unknown.append(name)
            continue
        place = changes.setdefault(weight, {}) if match else complete
        key = part if match else weight
        if key in place:
            unknown.append(name)
        place[key] = tensor.flatten() if key == _MAGNITUDE else tensor
    return complete, changes, unknown


def _faults(
    adapter: Adapter,
    weights: Mapping[str, Tensor],
    complete: Mapping[str, Tensor],
    changes: Mapping[str, Mapping[str, Tensor]],
) -> Iterator[str]:
    """Yield each tensor that is missing, surplus or of another shape than the base requires."""
    for name, tensor in complete.items():
        in_base = weights.get(EMBEDDING if name == PROJECTION else name)
        if in_base is None or in_base.shape != tensor.shape:
            expected = "none" if in_base is None else tuple(in_base.shape)
            yield f"{name} (expected {expected}, found {tuple(tensor.shape)})"
    for weight, parts in changes.items():
        module = _module_of(weight)
        if weight not in weights:
            yield f"the base has no {module}"
            continue
        (rows, *rest), rank = weights[weight].shape, adapter.rank(module)
        shapes = {_A: (rank, *rest), _B: (rows, rank, *(1 for _ in rest[1:]))}
        if adapter.is_dora:
            shapes[_MAGNITUDE] = (rows,)
        if _B_BIAS in parts and _bias_of(weight) in weights:
            shapes[_B_BIAS] = (rows,)
        for part in sorted(shapes.keys() | parts.keys()):
            expected = shapes.get(part, "none")
            shape = tuple(parts[part].shape) if part in parts else "none"
            if expected != shape:
                yield f"{module}.{part} (expected {expected}, found {shape})"


def _changed(
    adapter: Adapter, weights: Mapping[str, Tensor], weight: str, parts: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the merged weight, and its bias if that changes, by openai-whisper's names."""
    base, scale = weights[weight], adapter.scale(_module_of(weight))
    product = parts[_B].float().flatten(1) @ parts[_A].float().flatten(1)
    rows = base.float().flatten(1) + product * scale
    if adapter.is_dora:
        norms = torch.linalg.norm(rows, dim=1)
        rows = (parts[_MAGNITUDE].float() / norms)[:, None] * rows
    tensors = {weight: rows.reshape(base.shape).to(base.dtype)}
    if _B_BIAS in parts:
        bias = weights[_bias_of(weight)]
        tensors[_bias_of(weight)] = (bias.float() + parts[_B_BIAS].float() * scale).to(bias.dtype)
    return tensors


def _module_of(weight: str) -> str:
    """Return transformers' name of the module of a weight."""
    return to_huggingface(weight).removesuffix(".weight")


def _bias_of(weight: str) -> str:
    return f"{weight.removesuffix('weight')}bias"


def _check_tie(
    adapter: Adapter,
    base: Checkpoint,
    weights: Mapping[str, Tensor],
    complete: Mapping[str, Tensor],
) -> None:
    """Check that the output projection still equals the token embedding, as the network requires."""
    embedding = weights[EMBEDDING]
    unchanged = embedding if adapter.ties_weights else base.weights[EMBEDDING]
    projection = complete.get(PROJECTION, unchanged).to(embedding.dtype)
    if not torch.equal(projection, embedding):
        raise CheckpointError(
            f"the adapter in `{adapter.folder}` separates the output projection from the token embedding, "
            "which is not supported",
            why="it changes one of the two, or both differently",
            hint="train it without `embed_tokens` and `proj_out`, or with `ensure_weight_tying=True`",
        )


def _check_finite(adapter: Adapter, weights: Mapping[str, Tensor], names: set[str]) -> None:
    names |= {_bias_of(name) for name in names if _bias_of(name) in weights}
    not_finite = [name for name in sorted(names) if not bool(torch.isfinite(weights[name]).all())]
    if not_finite:
        raise CheckpointError(
            f"weights are not finite after the adapter in `{adapter.folder}` is merged",
            why=listing("with NaN or infinity", not_finite),
            hint="use an earlier checkpoint of the training",
        )


def _numbers(
    folder: Path, config: Mapping[str, Any], pattern_key: str, key: str, kind: Any
) -> dict[str, float]:
    """Return the numbers of a pattern by the end of a module's name, and the number of all others by ""."""
    pattern = config.get(pattern_key) or {}
    if not isinstance(pattern, dict):
        raise _unusable(folder, f"`{pattern_key}` is {quoted(pattern)}", "names and numbers")
    numbers = {}
    for name, number in {**pattern, "": config.get(key, 8)}.items():  # 8 is PEFT's default of both
        if isinstance(number, bool) or not isinstance(number, kind) or not 0 < number < 2**31:
            raise _unusable(folder, f"`{key}` is {quoted(number)}", "a positive number")
        # PEFT matches regular expressions. A hostile one runs for hours, so only names are read.
        literal = name.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if re.search(r"[^\w.]", literal):
            raise CheckpointError(
                f"`{folder}` has a pattern that is not supported",
                why=f"`{pattern_key}` has {quoted(name)}; expected names of modules",
                hint=_MERGE,
            )
        numbers[f"^{literal}" if name.startswith("^") else literal] = number
    return numbers


def _value(numbers: Mapping[str, float], module: str) -> float:
    """Return the number of the first name that is the module's, or its end from a dot on."""
    for name in numbers:
        if name and (f"^{module}" == name or f".{module}".endswith(f".{name}")):
            return numbers[name]
    return numbers[""]


def _unusable(folder: Path, stated: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"cannot use {CONFIG} in `{folder}`",
        why=f"{stated}; expected {expected}",
        hint="save the adapter again with PEFT's `save_pretrained`, or correct the value",
    )
