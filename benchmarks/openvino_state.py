"""Measure OpenVINO's `step` with the self-attention cache as inputs, and as variables inside the model.

    inputs     the host writes the new keys and values into the arrays that OpenVINO reads: its time counts
    variables  ReadValue and Assign, by `MakeStateful`; a Select writes the new token's row

Both give the same logits. The figures are medians of CPU time of the steps of one text, in turn.

    python benchmarks/openvino_state.py BUNDLE      a bundle on the target `openvino`
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino import opset13
from openvino._offline_transformations import apply_make_stateful_transformation

from whisperport.program.masks import MASKED
from whisperport.targets.openvino.runtime import Device

STEPS = 100


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    core, device = openvino.Core(), Device(threads=chosen.threads)

    def step() -> Any:
        folder = chosen.bundle / "openvino"
        return core.read_model(folder / "step.xml", folder / "weights.bin")

    model = step()
    layers = sum(port.any_name.startswith("self_k_") for port in model.inputs)
    requests = [
        core.compile_model(one, device.name, device.properties()).create_infer_request()
        for one in (model, with_variables(step(), layers))
    ]
    random = np.random.default_rng(0)
    arrays = {
        port.any_name: (0.1 * random.standard_normal(tuple(port.shape))).astype(np.float32)
        for port in model.inputs
    }
    for name, array in arrays.items():
        if name.startswith("self_"):
            array[:] = 0
    arrays["mask"][..., :-1], arrays["mask"][..., -1] = MASKED, 0
    arrays["row"] = np.zeros((1, arrays["self_v_0"].shape[1], 1), np.float32)
    for request in requests:
        for port in request.model_inputs:
            array = arrays[port.any_name]
            request.set_tensor(port, openvino.Tensor(array, shared_memory=True))
    measure(*requests, arrays, layers)


def with_variables(model: Any, layers: int) -> Any:
    """Return the model with its cache as variables, and an input `row` that is 1 at the new token."""
    old = {port.any_name: port for port in model.inputs}
    new = {port.any_name: port.get_node().input_value(0) for port in model.outputs}
    row = opset13.parameter([1, old["self_v_0"].shape[1], 1], np.float32, name="row")
    row.output(0).set_names({"row"})
    written = opset13.greater(row, opset13.constant(np.float32(0)))
    rows = {
        "v": written,
        "k": opset13.reshape(written, opset13.constant(np.array([1, 1, -1])), special_zero=False),
    }
    results, pairs = [], {}
    for layer in range(layers):
        for kind, at in rows.items():
            name = f"self_{kind}_{layer}"
            updated = opset13.select(at, new[f"new_{kind}_{layer}"], old[name])
            updated.output(0).set_names({f"next_{name}"})
            results.append(opset13.result(updated))
            pairs[name] = f"next_{name}"
    logits = [port.get_node() for port in model.outputs if port.any_name == "logits"]
    parameters = [port.get_node() for port in model.inputs]
    found = openvino.Model([*logits, *results], [*parameters, row], "step")
    apply_make_stateful_transformation(found, pairs)
    assert (
        len(found.get_sinks()) == 2 * layers
    )  # a model without variables converts without an error
    return found


def measure(inputs: Any, variables: Any, arrays: dict[str, Any], layers: int) -> None:
    """Decode a text with both, and print the medians."""
    times: dict[str, list[float]] = {"inputs": [], "variables": []}
    difference = 0.0
    for token in range(STEPS):
        arrays["row"][:] = 0
        arrays["row"][0, token] = 1
        started = time.process_time()
        variables.infer()
        found = variables.get_tensor("logits").data.copy()
        times["variables"].append(time.process_time() - started)
        started = time.process_time()
        inputs.infer()
        expected = inputs.get_tensor("logits").data.copy()
        for layer in range(layers):
            new_k, new_v = (inputs.get_tensor(f"new_{kind}_{layer}").data for kind in "kv")
            arrays[f"self_k_{layer}"][:, :, token : token + 1] = new_k
            arrays[f"self_v_{layer}"][:, token : token + 1] = new_v
        times["inputs"].append(time.process_time() - started)
        difference = max(difference, float(np.abs(found - expected).max()))
        arrays["mask"][..., token] = 0
    pairs = zip(times["variables"], times["inputs"], strict=True)
    for name, seconds in times.items():
        print(f"{name:10}{1e3 * statistics.median(seconds):8.2f} ms of CPU time per step")
    print(f"variables / inputs: {statistics.median(a / b for a, b in pairs):.2f}")
    print(f"largest difference of a logit: {difference:.1e}; OpenVINO {openvino.__version__}")


if __name__ == "__main__":
    main()
