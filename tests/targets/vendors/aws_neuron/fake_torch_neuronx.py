"""A fake `torch_neuronx`: it checks calls against recorded signatures. It compiles nothing.

`trace` returns what `torch.jit.trace` makes of the module, so that the artifact runs on the CPU. It has no
Neuron graph, and no test takes it for a compiled program. The file is a module of its own: a copy of it,
beside signatures.json, is the `torch_neuronx` of another interpreter.

What the real tracer assumes is asserted: see `xla_trace` in AWS's torch_neuronx,
xla_impl/hlo_conversion.py.
"""

import inspect
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

RECORDED = json.loads(Path(__file__).with_name("signatures.json").read_text(encoding="utf-8"))
__version__ = "2.9.0.2.15.0"

calls: list[tuple[str, dict[str, Any]]] = []  # every call, with its arguments by name
failure: dict[str, Any] = {}  # `printed`, `logged` and `status` of a compiler that fails


def signature(name: str) -> inspect.Signature:
    """The recorded signature of a function."""
    return inspect.signature(eval(f"lambda {RECORDED['functions'][name]}: None"))


def called(name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Bind arguments to the recorded signature; raise TypeError if they do not fit."""
    bound = signature(name).bind(*args, **kwargs)
    bound.apply_defaults()
    calls.append((name, dict(bound.arguments)))
    return dict(bound.arguments)


def trace(*args: Any, **kwargs: Any) -> Any:
    given = called("trace", *args, **kwargs)
    assert given["_"] == (), "positional arguments after the second are deprecated"
    module, inputs, aliases = (
        given[name] for name in ("func", "example_inputs", "input_output_aliases")
    )
    check_arguments(given["compiler_args"], cpu=given["cpu_backend"])
    assert os.path.isdir(given["compiler_workdir"])
    assert shutil.which("neuronx-cc"), "the compiler is not in PATH"
    check_tensors(module, inputs, aliases)
    traced = torch.jit.trace(module, inputs, check_trace=False)
    graph = traced.inlined_graph
    torch._C._jit_pass_dce(graph)
    for index, value in enumerate(list(graph.inputs())[1:]):
        if not value.uses():
            tensor = inputs[index]
            warnings.warn(
                "Received an input tensor that was unused. Tensor will be ignored. "
                f"(index={index}, shape={tensor.shape}, dtype={tensor.dtype})",
                stacklevel=2,
            )
    if failure:
        _fail(given["compiler_args"])
    return traced


trace.__signature__ = signature("trace")  # type: ignore[attr-defined]


def check_arguments(arguments: list[str], *, cpu: bool) -> None:
    """Assert that the compiler's reference has every argument with this value."""
    assert isinstance(arguments, list)
    known, left = RECORDED["compiler_arguments"], list(arguments)
    found = {}
    while left:
        name, has_value, value = left.pop(0).partition("=")
        assert name in known, f"neuronx-cc has no argument {name}"
        if known[name] != [] and not has_value:
            value = left.pop(0)
        assert known[name] is None or value in (known[name] or [""]), f"{name} {value}"
        found[name] = value
    assert found.get("--target") or not cpu, "without a device, --target is required"
    if "--logical-nc-config" in found or "-lnc" in found:
        assert found["--target"] in RECORDED["lnc_targets"], "error EARG001"
    assert found["--auto-cast"] == "none"


def check_tensors(module: torch.nn.Module, inputs: Any, aliases: Any) -> None:
    """Assert what the tracer assumes of a module's inputs, outputs and state."""
    assert isinstance(inputs, tuple)
    assert not module.training
    outputs = module(*inputs)
    parameters = {id(parameter) for parameter in module.parameters()}
    for what in (inputs, outputs):
        assert len({id(tensor) for tensor in what}) == len(what), "a tensor that occurs twice"
        for tensor in what:
            assert tensor.device.type == "cpu"
            assert tensor.dtype in (torch.float32, torch.bfloat16, torch.int32)
    for state, index in aliases.items():
        assert isinstance(state, torch.nn.Parameter)
        assert id(state) in parameters, "a state is a parameter of the module"
        assert not state.requires_grad
        assert (outputs[index].shape, outputs[index].dtype) == (state.shape, state.dtype)
    assert len(set(aliases.values())) == len(aliases)


def _fail(arguments: list[str]) -> None:
    """Fail as the real function does when its compiler fails."""
    os.write(1, failure.get("printed", "").encode())
    logfile = arguments[arguments.index("--logfile") + 1]
    Path(logfile).write_text(failure.get("logged", ""))
    raise RuntimeError(failure.get("message") or f"neuronx-cc failed with {failure['status']}")
