"""Run every program of a description with the standalone modules, in any version of torch.

python run_modules.py neuron_modules.py DESCRIPTION WEIGHTS OUTPUT.npz [neuron_fused.py]

With the last argument, all operators that it knows are fused.

Each program runs three times with seeded inputs, so that its state changes. The inputs come from numpy,
whose generator is the same everywhere.
"""

import importlib.util
import sys
import zlib
from typing import Any

import numpy as np
import torch


def main(script: str, description: str, weights: str, output: str, fused: str = "") -> None:
    modules, fusing = _loaded(script), _loaded(fused) if fused else None
    described, tensors = modules.read_description(description), modules.read_weights(weights)
    torch.set_num_threads(1)
    made: dict[str, np.ndarray] = {}
    for program in described["programs"]:
        generator = np.random.default_rng(zlib.crc32(program.encode()))
        module, examples, aliases = modules.build(described, tensors, program)
        if fusing is not None:
            fusing.fuse(module, fusing.OPTIONS)
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


def _loaded(script: str) -> Any:
    spec = importlib.util.spec_from_file_location(script.rpartition("/")[2][:-3], script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _input(generator: np.random.Generator, example: torch.Tensor, run: int) -> torch.Tensor:
    if example.is_floating_point():
        return torch.from_numpy(_random(generator, example.shape))
    return example + run if example.dim() == 2 else example.flip(0)  # positions; rows of beams


def _random(generator: np.random.Generator, shape: Any) -> np.ndarray:
    return generator.standard_normal(tuple(shape), dtype=np.float32)


if __name__ == "__main__":
    main(*sys.argv[1:])
