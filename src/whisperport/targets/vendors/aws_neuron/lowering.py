"""Write programs as a description and a weight file, which `neuron_modules` builds modules from.

A program becomes a list of aten's operators. Caches that it reads become state on the device, and the
encoder is joined with `cross_kv`, which reads its features.
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.errors import LoweringError
from whisperport.program.json_records import to_json
from whisperport.program.program_kind import CROSS_KV, ENCODER
from whisperport.program.signatures import roles
from whisperport.program.spec import ProgramSpec

if TYPE_CHECKING:  # boards have no torch
    from torch import Tensor

    from whisperport.model.trace.program import Program

TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # precision -> dtype of weights and state

Record = dict[str, Any]
"""The description of one program, as JSON; see `neuron_modules`."""


def lower_programs(
    programs: Sequence["Program"], precision: str, description: Path
) -> dict[str, int]:
    """Write programs of one precision to two files: the description, and the weights beside it.

    Args:
        programs: the programs.
        precision: "fp32" or "bf16".
        description: path of the description; the weights have the suffix `.safetensors`.

    Returns:
        Program -> number of nodes of its graph.

    Raises:
        LoweringError: a program has an operator that cannot be lowered.
    """
    described, weights = describe(programs, TORCH_DTYPES[precision])
    description.parent.mkdir(exist_ok=True)
    file = description.with_suffix(".safetensors")
    _write_weights(file, weights, TORCH_DTYPES[precision])
    description.write_text(json.dumps(described, indent=1, allow_nan=False), encoding="utf-8")
    shutil.copymode(description, file)  # safetensors lets only the owner read its files
    return {
        program.name: sum(n.op == "call_function" for n in program.exported.graph.nodes)
        for program in programs
    }


def describe(programs: Sequence["Program"], dtype: str) -> tuple[Record, dict[str, "Tensor"]]:
    """Return the description of programs, and the weights that they read: name -> tensor.

    Args:
        programs: the programs. A tensor that several of them read has one name.
        dtype: of weights and state: "float32" or "bfloat16".

    Raises:
        LoweringError: as for `lower_programs`.
    """
    from whisperport.targets.vendors.aws_neuron import neuron_modules

    weights: dict[str, Tensor] = {}
    records = {program.name: _graph(program, dtype, weights) for program in programs}
    if ENCODER in records and CROSS_KV in records:
        _join(records[ENCODER], records[CROSS_KV])
    return {"format": neuron_modules.FORMAT, "programs": records}, weights


def _join(encoder: Record, cross: Record) -> None:
    """Let the encoder compute the cross-attention K/V too, so that its features stay on the device."""
    (features,), (read, *further) = encoder["outputs"], cross["inputs"]
    if further or (features["shape"], features["dtype"]) != (read["shape"], read["dtype"]):
        return
    source = encoder["results"][0]["node"]

    def renamed(name: str) -> str:
        return source if name == read["name"] else f"{CROSS_KV}/{name}"

    def argument(value: Any) -> Any:
        if isinstance(value, list):
            return [argument(item) for item in value]
        is_node = isinstance(value, dict) and "node" in value
        return {"node": renamed(value["node"])} if is_node else value

    for node in cross["nodes"]:
        kwargs = {key: argument(value) for key, value in node["kwargs"].items()}
        changed = {"name": renamed(node["name"]), "args": argument(node["args"]), "kwargs": kwargs}
        encoder["nodes"].append({**node, **changed})
    encoder["weights"] |= {renamed(node): weight for node, weight in cross["weights"].items()}
    encoder["results"] += [
        {**result, "node": renamed(result["node"])} for result in cross["results"]
    ]


def _write_weights(path: Path, weights: Mapping[str, "Tensor"], dtype: str) -> None:
    """Write tensors; floating-point tensors are converted to `dtype`."""
    import torch
    from safetensors.torch import save_file

    floating = getattr(torch, dtype)
    written: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in weights.items():
        converted = tensor.detach().to(floating if tensor.is_floating_point() else tensor.dtype)
        converted, storage = converted.contiguous(), converted.untyped_storage().data_ptr()
        written[name] = (
            converted.clone() if storage in storages else converted
        )  # safetensors shares no memory
        storages.add(storage)
    save_file(written, path)


def _graph(program: "Program", dtype: str, weights: dict[str, "Tensor"]) -> Record:
    """Return a program as a list of aten's operators; its weights are added to `weights`.

    Raises:
        LoweringError: it has an operator that is no function of tensors.
    """
    from torch.export.graph_signature import InputKind

    exported = program.exported
    if any(_is_mutable(node) for node in exported.graph.nodes):
        exported = exported.run_decompositions({})
    read = {node.name for node in exported.graph.nodes if node.users}
    known = {_identity(tensor): name for name, tensor in weights.items()}
    reads: dict[str, str] = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT or spec.arg.name not in read:
            continue
        tensor = exported.state_dict.get(spec.target)
        tensor = exported.constants[spec.target] if tensor is None else tensor
        name = known.get(_identity(tensor), f"{program.name}/{spec.target}")
        reads[spec.arg.name], weights[name] = name, tensor
    results = zip(exported.graph_signature.user_outputs, program.spec.outputs, strict=True)
    return {
        **to_json(program.spec),
        "dtype": dtype,
        "state": _state(program.spec),
        "weights": reads,
        "results": [{"node": str(node), "dtype": tensor.dtype} for node, tensor in results],
        "nodes": [_node(program.name, node) for node in exported.graph.nodes if _computes(node)],
    }


def _state(spec: ProgramSpec) -> dict[str, str | None]:
    """Return the inputs that stay on the device -> the output with their new rows, None without one.

    A program has state if it reads caches in their usual form: keys (B·H, D, N), values (B·H, N, D).
    """
    from whisperport.targets.vendors.aws_neuron.neuron_modules import STATE

    inputs = {tensor.name: tensor.shape for tensor in spec.inputs}
    outputs = {tensor.name: tensor.shape for tensor in spec.outputs}
    kept = [name for name, role in roles(spec).items() if role != "input"]
    mask = inputs.get("mask", ())
    if spec.kind.reads != "caches" or len(mask) != 3 or "x" not in inputs:
        return {}
    lengths = (mask[2] - mask[1], mask[1])
    state: dict[str, str | None] = {}
    for name in kept:
        kind, _, layer = name.rpartition("_")
        new = f"new_{kind[-1]}_{layer}" if kind.startswith("self_") else None
        axis = 2 if kind.endswith("_k") else 1
        if kind not in STATE or (new and (inputs[name][axis], outputs[new][axis]) != lengths):
            return {}
        state[name] = new
    return state


def _node(program: str, node: Any) -> Record:
    """
    Raises:
        LoweringError: the operator cannot be described.
    """
    from whisperport.targets.vendors.aws_neuron.neuron_modules import ModuleError, operator_of

    name = "getitem" if getattr(node.target, "__name__", "") == "getitem" else str(node.target)
    try:
        operator_of(name)
        kwargs = {key: _argument(value) for key, value in node.kwargs.items() if key not in _PLACES}
        return {"name": node.name, "op": name, "args": _argument(node.args), "kwargs": kwargs}
    except (ModuleError, TypeError) as error:
        raise LoweringError(
            f"`aws-neuron` cannot lower the program `{program}`",
            why=f"`{node.name}`: {error}",
            hint="use a program of aten's operators that return new tensors",
        ) from error


_PLACES = ("device", "layout", "pin_memory", "memory_format")  # where a tensor is, not what it is


def _argument(value: Any) -> Any:
    """Return an argument of an operator as JSON.

    Raises:
        TypeError: it is none of node, number, text, dtype, None, or a list of them.
    """
    import torch

    if isinstance(value, torch.fx.Node):
        return {"node": value.name}
    if isinstance(value, list | tuple):
        return [_argument(item) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"an argument is {type(value).__name__}")


def _computes(node: Any) -> bool:
    """Whether a node computes a value, and does not only check one while a program is exported."""
    return bool(node.op == "call_function" and not str(node.target).startswith("aten._assert"))


def _is_mutable(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _identity(tensor: "Tensor") -> tuple[object, ...]:
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
