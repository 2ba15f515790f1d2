"""The stages of the compiler: quantize, compile, emulate. Run by `toolchain/driver.py`.

This script needs torch, executorch with its Arm backend, ethos-u-vela and tosa-tools, and does not import
whisperport: a copy of it is the `stages.py` of a work folder.

    step.pt2, calibration set ─quantize─► quantized.pt2
    quantized.pt2 ─compile─► step.pte, built.json, graph.tosa, tensors.json, estimate.csv
    graph.tosa, tensors.json, inputs ─emulate─► outputs

`emulate` runs graph.tosa, the quantized graph that Vela compiles, in the TOSA reference model. It does not
run Vela's command stream, which is inside step.pte.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

PACKAGES = ("executorch", "ethos-u-vela", "tosa-tools", "torch")
DTYPES = {"torch.int8": "int8", "torch.int16": "int16", "torch.int32": "int32"}
# executorch's name of a type -> numpy's.
SCALAR_TYPES = {"FLOAT": "float32", "HALF": "float16", "INT": "int32"}


class UnsupportedOperatorError(Exception):
    """The NPU does not support operators of the program: they are outside of the delegated subgraph."""


class CompilerExitError(Exception):
    """Vela ended the process."""


class OtherGraphError(Exception):
    """The compiled graph has other inputs or outputs than the program."""


def version() -> str:
    """Return the versions of the packages, such as "executorch 1.5.1, ethos-u-vela 5.1.0, …".

    Raises:
        ImportError: one of them is not installed.
    """
    return ", ".join(f"{name} {installed_version(name)}" for name in PACKAGES)


def check(version: str, settings: Mapping[str, Any]) -> str:
    """Return why these versions do not support the job; "" if they do.

    Args:
        settings: `versions`, package -> first numbers of the only version that is known to work.
    """
    for name, required in settings["versions"].items():
        match = re.search(rf"(?:^|, ){re.escape(name)} ([0-9.]+)", version)
        numbers = [int(part) for part in re.findall("[0-9]+", match[1] if match else "")]
        if numbers[: len(required)] != list(required):
            expected = ".".join(map(str, required))
            return f"{name} {expected} is needed; version {match[1] if match else 'unknown'} is installed"
    return ""


def _quantize(job: Any, kit: Any) -> None:
    """Quantize a program with Arm's quantizer and the calibration set."""
    import torch
    from executorch.backends.arm.ethosu import EthosUCompileSpec
    from executorch.backends.arm.quantizer import EthosUQuantizer
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    folder, own = job.folder, job.settings
    exported = torch.export.load(folder / own["model"])
    quantizer = EthosUQuantizer(EthosUCompileSpec(own["accelerator"]))
    quantizer.set_global(_configuration(own))
    prepared = prepare_pt2e(exported.module(check_guards=False), quantizer)
    samples = _samples(folder, own["calibration"])
    with torch.no_grad():
        for number, flat in enumerate(samples):
            print("sample", number + 1, "of", len(samples), flush=True)
            prepared(*_arguments(exported, flat))
        if own["precision"] == "w8a16":
            _widen_new_state(prepared, own)
        converted = convert_pt2e(prepared)
        example = _arguments(exported, samples[0])
        quantized = torch.export.export(converted, example, strict=False)
    with kit.written(folder / "quantized.pt2") as partial:
        torch.export.save(quantized, partial)


def _widen_new_state(prepared: Any, own: Mapping[str, Any]) -> None:
    """Give the key and value of a new token the range of those in the cache.

    They are the same quantity, and the calibration set has many more of them in the caches than among the
    outputs. A value above the range is cut off, for this token and every later one.
    """
    import torch
    from torch.utils import _pytree as pytree

    def observer(node: Any) -> Any:
        return getattr(prepared, str(node.target))

    placeholders = [node for node in prepared.graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in prepared.graph.nodes if node.op == "output")
    cached = dict(zip(own["inputs"], placeholders))  # noqa: B905  # Python 3.9
    for name, node in zip(own["outputs"], pytree.tree_leaves(output.args[0])):  # noqa: B905
        kind, _, rest = name.partition("_")
        if kind == "new" and f"self_{rest}" in cached:
            (read,) = cached[f"self_{rest}"].users
            known = observer(read)
            observer(node)(torch.stack([known.min_val, known.max_val]))


def _configuration(own: Mapping[str, Any]) -> Any:
    """Return Arm's configuration for a precision, with other ranges for 16-bit activations.

    Arm's own 16-bit configuration uses a histogram, which cuts rare large values off, and a smallest scale
    of 2^-12, which is larger than many weights of an attention over 1500 positions. Here the range is the
    largest value of the calibration set times `headroom`, and the smallest scale is 2^-24.
    """
    from dataclasses import replace

    import torch
    from executorch.backends.arm.quantizer import (
        get_symmetric_a16w8_quantization_config,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e import MinMaxObserver
    from torchao.quantization.pt2e.quantizer import QuantizationSpec

    if own["precision"] == "w8a8":
        return get_symmetric_quantization_config()
    headroom = float(own["headroom"])

    class Range(MinMaxObserver):  # type: ignore[misc]  # ships no types
        """The largest absolute value of the calibration set, times the headroom."""

        def calculate_qparams(self) -> tuple[Any, Any]:
            scale, zero_point = super().calculate_qparams()
            return scale * headroom, zero_point

    activation = QuantizationSpec(
        dtype=torch.int16,
        quant_min=-32767,
        quant_max=32767,
        qscheme=torch.per_tensor_symmetric,
        observer_or_fake_quant_ctr=Range.with_args(eps=2.0**-24),
    )
    configuration = get_symmetric_a16w8_quantization_config()
    return replace(configuration, input_activation=activation, output_activation=activation)


def _compile(job: Any, kit: Any) -> None:
    """Lower a quantized program to one subgraph for the NPU, and compile it with Vela."""
    import executorch.kernels.quantized  # noqa: F401  # the CPU's operators in the compiled file
    import torch
    import torchao.quantization.pt2e  # noqa: F401  # defines the operators of quantized programs
    from executorch.backends.arm.ethosu import EthosUCompileSpec, EthosUPartitioner
    from executorch.exir import to_edge_transform_and_lower

    folder, own = job.folder, job.settings
    vela = folder / "vela"
    shutil.rmtree(vela, ignore_errors=True)
    vela.mkdir()
    spec = EthosUCompileSpec(
        own["accelerator"],
        system_config=own["system_config"],
        memory_mode=own["memory_mode"],
        extra_flags=list(own["flags"]),
    )
    spec.dump_intermediate_artifacts_to(vela.name)  # relative: the compiled file has a copy of it
    quantized = torch.export.load(folder / "quantized.pt2")
    try:
        with kit.inside(folder), kit.timed("compilation"):
            edge = to_edge_transform_and_lower(
                {job.name: quantized}, partitioner=[EthosUPartitioner(spec)]
            )
    except SystemExit as error:
        raise CompilerExitError(f"Vela ended with exit status {error.code}") from error
    tensors = _tensors(edge.exported_program(job.name), own, vela / "out.tosa")
    finished = edge.to_executorch()
    kit.write_json(
        folder / "built.json",
        {"accelerator": own["accelerator"], **described(finished.executorch_program)},
    )
    kit.write_json(folder / "tensors.json", tensors)
    os.replace(str(vela / "out.tosa"), str(folder / "graph.tosa"))
    (summary,) = (vela / "output").glob("out_summary_*.csv")
    os.replace(str(summary), str(folder / "estimate.csv"))
    with kit.written(folder / own["artifact"]) as partial:
        partial.write_bytes(finished.buffer)


def described(program: Any) -> dict[str, Any]:
    """Return what a compiled program consists of: its signature, and what runs where.

    Args:
        program: executorch's description of a program with one method.
    """
    (plan,) = program.execution_plan
    calls = [instruction.instr_args for chain in plan.chains for instruction in chain.instructions]
    kernels = [
        plan.operators[call.op_index] for call in calls if type(call).__name__ == "KernelCall"
    ]
    inputs, outputs = (
        [_shown(plan.values[index].val) for index in side] for side in (plan.inputs, plan.outputs)
    )
    return {
        "subgraphs": sum(type(call).__name__ == "DelegateCall" for call in calls),
        "undelegated": [f"{kernel.name}.{kernel.overload}".rstrip(".") for kernel in kernels],
        "inputs": inputs,
        "outputs": outputs,
    }


def _shown(tensor: Any) -> str:
    """Return shape and type, such as "[1, 80] float32"."""
    kind = tensor.scalar_type.name
    return f"{list(tensor.sizes)} {SCALAR_TYPES.get(kind, kind)}"


def _tensors(exported: Any, own: Mapping[str, Any], graph: Path) -> dict[str, Any]:
    """Return how the inputs and outputs of the NPU's graph follow from those of the program.

    Raises:
        UnsupportedOperatorError: an operator is outside of the NPU's only subgraph.
        OtherGraphError: the subgraph's inputs cannot be found among the program's.
    """
    calls = [node for node in exported.graph.nodes if node.op == "call_function"]
    delegates = [node for node in calls if node.target.__name__ == "executorch_call_delegate"]
    outside = [node.target.__name__ for node in calls if _kind(node) == "other"]
    if outside or len(delegates) != 1:
        kinds = ", ".join(sorted(set(outside))[:8])
        raise UnsupportedOperatorError(
            f"{len(outside)} operators are outside of {len(delegates)} subgraphs for the NPU: {kinds}"
        )
    (delegate,) = delegates
    lowered = getattr(exported.graph_module, delegate.args[0].target)
    inner = list(lowered.original_module.graph_signature.user_inputs)
    names = dict(zip(exported.graph_signature.user_inputs, own["inputs"]))  # noqa: B905  # Python 3.9
    inputs = {
        str(tensor): {"name": names[node.args[0].name], **_scale(node)}
        for tensor, node in zip(inner, delegate.args[1:])  # noqa: B905
        if _kind(node) == "quantize" and node.args[0].name in names
    }
    stated, results = _graph_tensors(graph)
    missing = set(stated) - set(inputs)
    if missing:
        raise OtherGraphError(f"the inputs {sorted(missing)[:4]} are not those of the program")
    (output,) = (node for node in exported.graph.nodes if node.op == "output")
    outputs = [{"index": node.args[0].args[1], **_scale(node)} for node in output.args[0]]
    if len(outputs) != len(own["outputs"]) or len(results) <= max(o["index"] for o in outputs):
        raise OtherGraphError(f"it has {len(results)} outputs; expected {len(own['outputs'])}")
    return {"inputs": [inputs[name] for name in stated], "outputs": outputs}


def _kind(node: Any) -> str:
    """Return what an undelegated node does: quantize, dequantize, delegate, or other."""
    name = str(getattr(node.target, "__name__", node.target))
    if "dequantize_per_tensor" in name:
        return "dequantize"
    if "quantize_per_tensor" in name:
        return "quantize"
    return "delegate" if name in ("executorch_call_delegate", "getitem") else "other"


def _scale(node: Any) -> dict[str, Any]:
    """Return the scale of a quantize or dequantize node, whose arguments torch names."""
    _, scale, zero_point, low, high, dtype = node.args[:6]
    return {
        "scale": float(scale),
        "zero_point": int(zero_point),
        "low": int(low),
        "high": int(high),
        "dtype": DTYPES[str(dtype)],
    }


def _graph_tensors(path: Path) -> tuple[list[str], list[str]]:
    """Return the names of the inputs and of the outputs of a TOSA graph, in the order of the graph.

    The order of the inputs is that of their first use, and not that of the program.
    """
    from tosa.TosaGraph import TosaGraph

    block = TosaGraph.GetRootAs(path.read_bytes(), 0).Regions(0).Blocks(0)
    inputs = [block.Inputs(i).decode("utf-8") for i in range(block.InputsLength())]
    outputs = [block.Outputs(i).decode("utf-8") for i in range(block.OutputsLength())]
    return inputs, outputs


def _emulate(job: Any, kit: Any) -> None:
    """Run the TOSA graph in the reference model, once per sample."""
    folder, own = job.folder, job.settings
    graph = (folder / "graph.tosa").read_bytes()
    described = json.loads((folder / "tensors.json").read_text(encoding="utf-8"))
    kit.run_samples(
        folder,
        own["emulated_inputs"],
        own["emulated_outputs"],
        lambda inputs: run_graph(graph, described, inputs),
    )


def load(files: Sequence[Path]) -> Callable[[Mapping[str, Any]], list[Any]]:
    """Return what runs a graph in the reference model: input name -> array, to the outputs.

    Args:
        files: graph.tosa and tensors.json, with any names.

    Raises:
        ImportError: the reference model is not installed.
        OtherGraphError: an input has another type than the NPU's integers.
    """
    import tosa_reference_model  # noqa: F401  # before the first run

    graph, described = files[0].read_bytes(), json.loads(files[1].read_text(encoding="utf-8"))
    for tensor in described["inputs"]:
        if tensor["dtype"] not in DTYPES.values():
            raise OtherGraphError(f"the input {tensor['name']} has the type {tensor['dtype']}")
    return lambda inputs: run_graph(graph, described, inputs)


def run_graph(graph: bytes, described: Mapping[str, Any], inputs: Mapping[str, Any]) -> list[Any]:
    """Run a TOSA graph in the reference model.

    Args:
        graph: the graph's flatbuffer.
        described: the content of tensors.json.
        inputs: name of the program's input -> float32 array.

    Returns:
        The program's outputs, float32.
    """
    import numpy as np
    import tosa_reference_model

    integers = []
    for tensor in described["inputs"]:
        steps = np.rint(inputs[tensor["name"]] / np.float32(tensor["scale"]))
        clipped = np.clip(steps + tensor["zero_point"], tensor["low"], tensor["high"])
        integers.append(np.ascontiguousarray(clipped.astype(tensor["dtype"])))
    outputs, status = tosa_reference_model.run(graph, integers, verbosity="NONE")
    if status != tosa_reference_model.GraphStatus.TOSA_VALID:
        raise OtherGraphError(f"the TOSA reference model reports {status}")
    results = []
    for tensor in described["outputs"]:
        steps = np.asarray(outputs[tensor["index"]], np.float32) - tensor["zero_point"]
        results.append(steps * np.float32(tensor["scale"]))
    return results


def _samples(folder: Path, files: Sequence[str]) -> list[list[Any]]:
    """Return the calibration set: for each sample, the tensors of all inputs."""
    import numpy as np
    import torch

    arrays = [np.load(folder / file, mmap_mode="r", allow_pickle=False) for file in files]
    return [
        [torch.from_numpy(np.array(array[sample])) for array in arrays]
        for sample in range(len(arrays[0]))
    ]


def _arguments(exported: Any, flat: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of an exported program: its inputs, in the lists that it expects."""
    from torch.utils import _pytree as pytree

    arguments, _ = pytree.tree_unflatten(list(flat), exported.call_spec.in_spec)
    return tuple(arguments)


STAGES: Mapping[str, Callable[[Any, Any], None]] = {
    "quantize": _quantize,
    "compile": _compile,
    "emulate": _emulate,
}
