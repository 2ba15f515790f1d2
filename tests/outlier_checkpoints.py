"""Checkpoints with massive activations, made from the embedded model by `training/outliers.py`, and
a quantizer, for which they are difficult.

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
from torch import Tensor, nn

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


# The tensors of an encoder in torch are rounded to stored ranges, as a toolchain's quantizer does.


class Rounding:
    """Rounds inputs and outputs of linear layers and convolutions, and blocks' outputs.

    While `recording`, the ranges are recorded and nothing is rounded.

    Args:
        encoder: the encoder.
        bits: of the rounded tensors.
        percentile: of the values, at which a range ends.
        kept: modules whose output stays in float32.
    """

    def __init__(
        self,
        encoder: nn.Module,
        *,
        bits: int = 8,
        percentile: float = 100.0,
        kept: tuple[str, ...] = (),
    ) -> None:
        self.recording, self._ranges = True, dict[str, tuple[float, float]]()
        self._levels, self._percentile = 2**bits - 1, percentile
        for name, module in encoder.named_modules():
            if isinstance(module, nn.Linear | nn.Conv1d):
                module.register_forward_pre_hook(
                    lambda _, x, name=name: self._round(f"{name}.in", x[0])
                )
            elif not name.startswith("blocks.") or name.count(".") > 1:
                continue
            if name not in kept:
                module.register_forward_hook(lambda _m, _x, y, name=name: self._round(name, y))

    def _round(self, name: str, x: Tensor) -> Tensor:
        if self.recording:
            ends = np.percentile(x.numpy(), (100 - self._percentile, self._percentile))
            low, high = self._ranges.get(name, (0.0, 0.0))
            self._ranges[name] = (min(low, float(ends[0])), max(high, float(ends[1])))
            return x
        low, high = self._ranges[name]
        scale = (high - low) / self._levels
        return ((x.clamp(low, high) - low) / scale).round() * scale + low


def round_weights(encoder: nn.Module, *, per_channel: bool) -> None:
    """Round the weights of linear layers and convolutions to 8 bits, symmetric."""
    for module in encoder.modules():
        if isinstance(module, nn.Linear | nn.Conv1d):
            weight = module.weight.detach()
            largest = weight.abs().flatten(1).amax(1) if per_channel else weight.abs().amax()
            step = largest.reshape(-1, *[1] * (weight.dim() - 1)) / 127
            module.weight = nn.Parameter((weight / step).round() * step, requires_grad=False)


def in_eight_bits(encoder: nn.Module, mels: list[Tensor], kind: str) -> nn.Module:
    """Quantize an encoder in place: "min-max", "percentile", "per-channel weights", or "w8a16"."""
    rounding = Rounding(
        encoder,
        bits=16 if kind == "w8a16" else 8,
        percentile=99.9 if kind == "percentile" else 100.0,
    )
    with torch.no_grad():
        for mel in mels:
            encoder(mel)
    rounding.recording = False
    round_weights(encoder, per_channel=kind in ("per-channel weights", "w8a16"))
    return encoder
