"""Descriptions and weights of programs of a few kilobytes, as `neuron_modules` reads them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from whisperport.targets.aws_neuron import neuron_modules

SIZES = {"width": 16, "heads": 2, "layers": 2, "inner": 32}
ROW = {"dtype": "float32", "batch": 1}
DECODE = {**ROW, "cached": 8, "context": 6, **SIZES}
PROGRAMS: dict[str, dict[str, Any]] = {
    "encoder": {
        "kind": "encoder",
        "n_mels": 4,
        "positions": 6,
        "cross_heads": 2,
        "cross_layers": 2,
        **ROW,
        **SIZES,
    },
    "cross_kv": {
        "kind": "cross_kv",
        **ROW,
        "positions": 6,
        "width": 16,
        "heads": 2,
        "layers": 2,
    },
    "prefill_4": {"kind": "prefill", "tokens": 4, "picked": 2, "vocab": 11, **DECODE},
    "step": {"kind": "step", "tokens": 1, "vocab": 11, **DECODE},
    "step_3": {"kind": "step", "tokens": 1, "vocab": 11, **DECODE, "batch": 3},
    "align": {
        "kind": "align",
        "tokens": 3,
        "vocab": 0,
        "alignment_heads": [[0, 1], [1, 0]],
        **DECODE,
    },
}
DESCRIPTION, WEIGHTS = "fp32.json", "fp32.safetensors"


def description(dtype: str = "float32") -> dict[str, Any]:
    programs = {name: {**record, "dtype": dtype} for name, record in PROGRAMS.items()}
    return {"format": neuron_modules.FORMAT, "programs": programs}


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights of every program, with openai-whisper's names."""
    made, generator = description(), torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    for program in PROGRAMS:
        shapes |= neuron_modules.weight_shapes(made, program)
    return {name: 0.4 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder: Path, dtype: str = "float32") -> None:
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DESCRIPTION).write_text(json.dumps(description(dtype)))
    save_file(weights(), folder / WEIGHTS)
