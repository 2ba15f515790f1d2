"""Trace the standalone modules with PyTorch/XLA on the CPU, and write their HLO.

    python trace_with_torch_xla.py neuron_modules.py DESCRIPTION WEIGHTS FOLDER

For each program two files: `NAME.hlo.pb`, and `NAME.json` with `names`, the names of the module's
parameters and inputs in the order of the HLO parameters, and `aliases`, name -> output. PyTorch/XLA traces
from the outputs, so it leaves out what they do not depend on. The aliases are not in the HLO: torch-neuronx
adds them.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch
import torch_xla


def main(script: str, description: str, weights: str, folder: str) -> None:
    spec = importlib.util.spec_from_file_location("neuron_modules", script)
    assert spec is not None
    assert spec.loader is not None
    modules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(modules)
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


if __name__ == "__main__":
    main(*sys.argv[1:])
