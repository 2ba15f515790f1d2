"""Checkpoints with massive activations, made from the embedded model by `training/outliers.py`.

Stored is the difference to the embedded model: `outliers/NAME.xz` is an LZMA file of the length of a JSON
header (4 bytes, little endian), the header, and for each changed tensor, in the header's order, int8
multiples of its step; the planted unit's own row and column follow as float16. Before these are, whole, the
tensors that the header lists under `float16`.
"""

import hashlib
import json
import lzma
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from safetensors.torch import save_file
from torch import Tensor

from whisperport.model.checkpoint import load_checkpoint
from whisperport.speech.data import embedded_model

STORED = Path(__file__).parent / "outliers"
NAMES = tuple(sorted(path.stem for path in STORED.glob("*.xz")))

# openai-whisper's names -> transformers'
_RENAMED = (
    (".blocks.", ".layers."),
    (".cross_attn_ln", ".encoder_attn_layer_norm"),
    (".attn_ln", ".self_attn_layer_norm"),
    (".mlp_ln", ".final_layer_norm"),
    (".cross_attn.", ".encoder_attn."),
    (".attn.", ".self_attn."),
    (".key.", ".k_proj."),
    (".value.", ".v_proj."),
    (".query.", ".q_proj."),
    (".out.", ".out_proj."),
    (".mlp.0.", ".fc1."),
    (".mlp.2.", ".fc2."),
    ("encoder.ln_post.", "encoder.layer_norm."),
    ("decoder.ln.", "decoder.layer_norm."),
    ("positional_embedding", "embed_positions.weight"),
    ("token_embedding", "embed_tokens"),
)


@dataclass(frozen=True)
class Planted:
    """Where the outlier sits: block (`encoder.blocks.3`), unit of its MLP, channel, value and frames."""

    name: str
    unit: int
    channel: int
    value: float
    frames: tuple[int, ...]  # empty: all


def outlier_checkpoint(name: str, cache_folder: Path) -> Path:
    """The folder of a checkpoint in transformers' format, made once in a folder that all workers share."""
    folder = cache_folder / f"outlier-{name}"
    cache_folder.mkdir(parents=True, exist_ok=True)
    with FileLock(cache_folder / f"outlier-{name}.lock"):
        if not folder.exists():
            write_checkpoint(STORED / f"{name}.xz", folder)
    return folder


def write_checkpoint(file: Path, folder: Path) -> None:
    """Write the checkpoint of a stored difference; the folder appears complete."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    embedded_model.unpack_model(part)
    named = {_transformers_name(k): v for k, v in outlier_weights(file).items()}
    (part / "model.safetensors").unlink()
    save_file(named, part / "model.safetensors", metadata={"format": "pt"})
    part.rename(folder)


def _transformers_name(name: str) -> str:
    for openai, theirs in _RENAMED:
        name = name.replace(openai, theirs)
    return f"model.{name}"


def outlier_weights(file: Path) -> dict[str, Tensor]:
    """The float16 weights of a stored difference, with openai-whisper's names."""
    header, body = _read(file)
    planted = planted_in(file)
    weights = {k: v.clone() for k, v in load_checkpoint("default").weights.items()}
    at = 0
    for name in header.get("float16", ()):
        shape = weights[name].shape
        whole = np.frombuffer(body, np.float16, shape.numel(), at).reshape(shape)
        weights[name] = torch.from_numpy(whole.copy())
        at += whole.nbytes
    for name, step in header["steps"].items():
        base = weights[name].numpy()
        multiples = np.frombuffer(body, np.int8, base.size, at).reshape(base.shape)
        at += base.size
        changed = (base.astype(np.float32) + np.float32(step) * multiples).astype(np.float16)
        if (own := _own_part(name, planted)) is not None:
            count = changed[own].size
            changed[own] = np.frombuffer(body, np.float16, count, at).reshape(changed[own].shape)
            at += 2 * count
        weights[name] = torch.from_numpy(changed)
    if at != len(body):
        raise ValueError(f"{file}: {len(body) - at} bytes are left over")
    return weights


def planted_in(file: Path) -> Planted:
    """Where the outlier of a stored difference sits."""
    header, _ = _read(file)
    frames = tuple(header["frames"])
    return Planted(header["name"], header["unit"], header["channel"], header["value"], frames)


def digest(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of the bytes of all tensors, in the order of their names."""
    sha = hashlib.sha256()
    for name in sorted(weights):
        sha.update(weights[name].contiguous().numpy().tobytes())
    return sha.hexdigest()


def _own_part(name: str, planted: Planted) -> tuple[slice | int, ...] | None:
    """The part of a tensor that belongs to the planted unit."""
    unit = planted.unit
    parts = {"0.weight": (unit,), "0.bias": (unit,), "2.weight": (slice(None), unit)}
    return {f"{planted.name}.mlp.{k}": v for k, v in parts.items()}.get(name)


@cache
def _read(file: Path) -> tuple[dict[str, Any], bytes]:
    content = lzma.decompress(file.read_bytes())
    end = 4 + int.from_bytes(content[:4], "little")
    return json.loads(content[4:end]), content[end:]
