"""Merge a LoRA adapter of PEFT with its base, the checkpoint that it was trained on.

An adapter is a folder with adapter_config.json and adapter_model.safetensors. For a module with the weight
W (out, in, *kernel) the file has the factors A (r, in, *kernel) and B (out, r, *1). The merged weight is
W + scale * B A; scale is `lora_alpha` / r, or `lora_alpha` / sqrt(r) with `use_rslora`. With `use_dora`,
each row of the merged weight is then scaled to have the norm in `lora_magnitude_vector`. Modules and biases
that were trained completely replace those of the base. `target_modules` is not needed: the names in the
file state the modules. `fan_in_fan_out` has no effect on Whisper's modules, in PEFT as well.
Source: huggingface/peft@5d602fd, docs/source/developer_guides/checkpoint.md and src/peft/tuners/lora.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

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
from whisperport.model.checkpoint.weight_files import read_tensors
from whisperport.program.adapter_settings import (
    B_BIAS,
    CONFIG,
    MAGNITUDE,
    MERGE,
    A,
    Adapter,
    B,
    module_and_part,
    weight_file,
)
from whisperport.program.bundle.folder import file_sha256


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
    path = weight_file(adapter.folder)
    complete, changes, unknown = _sorted_by_kind(read_tensors(path))
    misfits = [*_faults(adapter, base.weights, complete, changes)]
    faults = [listing("unexpected", unknown), listing("missing or of another shape", misfits)]
    if any(faults) or not (complete or changes):
        raise CheckpointError(
            f"the adapter in `{adapter.folder}` does not fit its base, `{adapter.base}`",
            why="; ".join(filter(None, faults)) or f"{path.name} has no tensors",
            hint=f"check that it was trained on this base, or {MERGE}",
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
        module, part = module_and_part(name)
        weight = from_huggingface(f"{module}.weight" if part else module)
        if not part and module == PROJECTION:
            weight = PROJECTION
        if weight is None or (part and weight == EMBEDDING):
            unknown.append(name)
            continue
        place = changes.setdefault(weight, {}) if part else complete
        key = part or weight
        if key in place:
            unknown.append(name)
        place[key] = tensor.flatten() if key == MAGNITUDE else tensor
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
        shapes = {A: (rank, *rest), B: (rows, rank, *(1 for _ in rest[1:]))}
        if adapter.is_dora:
            shapes[MAGNITUDE] = (rows,)
        if B_BIAS in parts and _bias_of(weight) in weights:
            shapes[B_BIAS] = (rows,)
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
    product = parts[B].float().flatten(1) @ parts[A].float().flatten(1)
    rows = base.float().flatten(1) + product * scale
    if adapter.is_dora:
        norms = torch.linalg.norm(rows, dim=1)
        rows = (parts[MAGNITUDE].float() / norms)[:, None] * rows
    tensors = {weight: rows.reshape(base.shape).to(base.dtype)}
    if B_BIAS in parts:
        bias = weights[_bias_of(weight)]
        tensors[_bias_of(weight)] = (bias.float() + parts[B_BIAS].float() * scale).to(bias.dtype)
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
