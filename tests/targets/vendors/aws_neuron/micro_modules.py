"""Descriptions and weights of programs of a few kilobytes, as `neuron_modules` reads them."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.program import Program
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.dims import Dims
from whisperport.targets.vendors.aws_neuron import lowering

from ....micro import whisper_dims

SIZES = {"n_mels": 4, "n_audio_ctx": 6, "n_text_ctx": 8, "n_vocab": 11, "n_audio_ffn": 32}
DIMS = replace(whisper_dims(16, 2, heads=2), **SIZES, n_text_ffn=32)
LAYERS = DIMS.n_text_layer
HEADS = [(0, 1), (1, 0)]
PROGRAMS = ("encoder", "cross_kv", "prefill_4", "step", "step_4", "align")
DECODERS = ("prefill_4", "step", "step_4", "align")
DESCRIPTION, WEIGHTS = "fp32.json", "fp32.safetensors"


def whisper(dims: Dims = DIMS) -> Whisper:
    """A model with random weights, whose layers have a gain of about 1."""
    model = Whisper(dims).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * dims.n_text_state**-0.5)
    return model


@cache
def programs(dims: Dims = DIMS) -> tuple[Program, ...]:
    """The traced programs of a model."""
    return tuple(whisper_programs(Parts(whisper(dims), HEADS), PROGRAMS))


def description(dtype: str = "float32") -> dict[str, Any]:
    """A description that a test may change."""
    found: dict[str, Any] = json.loads(json.dumps(lowering.describe(programs(), dtype)[0]))
    return found


def weights() -> dict[str, torch.Tensor]:
    return lowering.describe(programs(), "float32")[1]


def write(folder: Path, dtype: str = "float32", dims: Dims = DIMS) -> None:
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    described, tensors = lowering.describe(programs(dims), dtype)
    (folder / DESCRIPTION).write_text(json.dumps(described))
    save_file(tensors, folder / WEIGHTS)
