"""Run every program of a description with the standalone modules, in any version of torch.

python run_modules.py neuron_modules.py DESCRIPTION WEIGHTS OUTPUT.npz

Each program runs three times with seeded inputs, so that its state changes. The inputs come from numpy,
whose generator is the same everywhere.
"""

import importlib.util
import sys
import zlib
from typing import Any

import numpy as np
import torch


def main(script: str, description: str, weights: str, output: str) -> None:
    spec = importlib.util.spec_from_file_location("neuron_modules", script)
    assert spec is not None
    assert spec.loader is not None
    modules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(modules)
    described, tensors = modules.read_description(description), modules.read_weights(weights)
    torch.set_num_threads(1)
    made: dict[str, np.ndarray] = {}
    for program in described["programs"]:
        generator = np.random.default_rng(zlib.crc32(program.encode()))
        module, examples, aliases = modules.build(described, tensors, program)
        for name, state in module.named_parameters():
            if modules.is_state(name):
                state.data.copy_(torch.from_numpy(_random(generator, state.shape)))
        for run in range(3):
            inputs = tuple(_input(generator, example, run) for example in examples)
            outputs = modules.run(module, inputs, aliases)
            for index, one in enumerate([*outputs, *(state.data for state in aliases)]):
                made[f"{program}/{run}/{index}"] = one.float().numpy()
    np.savez(output, **made)
    print(torch.__version__)


def _input(generator: np.random.Generator, example: torch.Tensor, run: int) -> torch.Tensor:
    if example.is_floating_point():
        return torch.from_numpy(_random(generator, example.shape))
    return example + run if example.dim() == 2 else example.flip(0)  # positions; rows of beams


def _random(generator: np.random.Generator, shape: Any) -> np.ndarray:
    return generator.standard_normal(tuple(shape), dtype=np.float32)


if __name__ == "__main__":
    main(*sys.argv[1:])
