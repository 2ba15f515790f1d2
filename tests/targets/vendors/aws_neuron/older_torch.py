"""What test_torch_2_9.py does with the standalone modules in another environment: run them, or trace them.

    python older_torch.py run neuron_modules.py DESCRIPTION WEIGHTS OUTPUT.npz
    python older_torch.py trace neuron_modules.py DESCRIPTION WEIGHTS FOLDER

`run` works in any version of torch. Each program runs three times with seeded inputs, so that its state
changes. The inputs come from numpy, whose generator is the same everywhere.

`trace` needs PyTorch/XLA, and writes two files for each program: `NAME.hlo.pb`, and `NAME.json` with
`names`, the names of the module's parameters and inputs in the order of the HLO parameters, and `aliases`,
name -> output. PyTorch/XLA traces from the outputs, so it leaves out what they do not depend on. The
aliases are not in the HLO: torch-neuronx adds them.
"""

import importlib.util
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch


def run(script: str, description: str, weights: str, output: str) -> None:
    modules = _loaded(script)
    described, tensors = modules.read_description(description), modules.read_weights(weights)
    torch.set_num_threads(1)
    made: dict[str, np.ndarray] = {}
    for program in described["programs"]:
        generator = np.random.default_rng(zlib.crc32(program.encode()))
        module, examples, aliases = modules.build(described, tensors, program)
        for name, state in module.named_parameters():
            if modules.is_state(name):
                state.data.copy_(torch.from_numpy(_random(generator, state.shape)))
        for number in range(3):
            inputs = tuple(_input(generator, example, number) for example in examples)
            outputs = modules.run(module, inputs, aliases)
            for index, tensor in enumerate([*outputs, *(state.data for state in aliases)]):
                made[f"{program}/{number}/{index}"] = tensor.float().numpy()
    np.savez(output, **made)
    print(torch.__version__)


def trace(script: str, description: str, weights: str, folder: str) -> None:
    import torch_xla

    modules = _loaded(script)
    described, tensors = modules.read_description(description), modules.read_weights(weights)
    device = torch_xla.device()
    for program in described["programs"]:
        module, examples, aliases = modules.build(described, tensors, program)
        states = {n: aliases[p] for n, p in module.named_parameters() if p in aliases}
        module = module.to(device)
        inputs = [example.to(device) for example in examples]
        torch_xla.sync()  # copies are no part of the program
        with torch.no_grad():
            outputs = list(module(*inputs))
        names = {torch_xla._XLAC._xla_get_tensor_id(p): n for n, p in module.named_parameters()}
        names |= {torch_xla._XLAC._xla_get_tensor_id(x): f"input {i}" for i, x in enumerate(inputs)}
        ids, _ = torch_xla._XLAC._get_tensors_xla_device_data_node(outputs)
        ordered = [names.get(i, f"constant {i}") for i in ids]  # numbers in the code are parameters
        stated = json.dumps({"names": ordered, "aliases": states})
        (Path(folder) / f"{program}.json").write_text(stated)
        hlo = torch_xla._XLAC._get_xla_tensors_hlo_proto(outputs)
        (Path(folder) / f"{program}.hlo.pb").write_bytes(hlo)
    print(torch.__version__, torch_xla.__version__)


def _loaded(script: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(script).stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _input(generator: np.random.Generator, example: torch.Tensor, number: int) -> torch.Tensor:
    if example.is_floating_point():
        return torch.from_numpy(_random(generator, example.shape))
    return example + number if example.dim() == 2 else example.flip(0)  # positions; rows of beams


def _random(generator: np.random.Generator, shape: Any) -> np.ndarray:
    return generator.standard_normal(tuple(shape), dtype=np.float32)


if __name__ == "__main__":
    {"run": run, "trace": trace}[sys.argv[1]](*sys.argv[2:])
