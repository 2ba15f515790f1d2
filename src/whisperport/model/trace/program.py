"""A program: a torch graph of static shapes with a name and a signature, built-in or third-party."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from whisperport.errors import LoweringError, out_of_memory
from whisperport.model.trace.writes import memory_written
from whisperport.program.spec import ProgramSpec, TensorSpec


@dataclass(frozen=True, slots=True)
class Program:
    """An exported graph, and the names, shapes and dtypes of its inputs and outputs."""

    exported: ExportedProgram
    spec: ProgramSpec

    @property
    def name(self) -> str:
        """The program's name."""
        return self.spec.name


@dataclass(frozen=True, slots=True, eq=False)
class Untraced:
    """A module with the static inputs that it is traced with; see `trace`. Eager torch runs it as it is."""

    name: str
    module: nn.Module
    inputs: tuple[Any, ...]
    outputs: Sequence[str]

    def traced(self) -> Program:
        """Trace it; see `trace`."""
        return trace(self.name, self.module, self.inputs, self.outputs)


def trace(
    name: str, module: nn.Module, inputs: tuple[Any, ...], outputs: Sequence[str] = ()
) -> Program:
    """Export `module` with the static shapes of `inputs`.

    Args:
        name: of the program in bundles, reports and files with several methods.
        module: is set to evaluation mode.
        inputs: positional arguments, tensors or lists of tensors; the members of a list are named after
            the parameter, such as `self_k_0`, `self_k_1`.
        outputs: a name for each output; empty: the names in the graph.

    Raises:
        LoweringError: torch cannot export the module, an input or output is not a tensor, or a shape is
            dynamic.
    """
    return as_program(name, exported_module(name, module.eval(), inputs), outputs)


def exported_module(
    name: str,
    module: nn.Module,
    inputs: tuple[Any, ...],
    keywords: Mapping[str, Any] | None = None,
) -> ExportedProgram:
    """Export `module` as it is in evaluation mode; its mode does not change.

    Args:
        name: of the program in errors.
        inputs: positional arguments.
        keywords: keyword arguments.

    Raises:
        LoweringError: torch cannot export the module.
    """
    modes = {submodule: submodule.training for submodule in module.modules()}
    try:
        with tracing(name):
            return torch.export.export(module.eval(), inputs, dict(keywords or {}), strict=False)
    finally:
        for submodule, training in modes.items():
            submodule.training = training


@contextmanager
def tracing(name: str) -> Iterator[None]:
    """Raise LoweringError if torch cannot trace a module within the block, without gradients.

    Args:
        name: of the program in the error.
    """
    try:
        with torch.no_grad():
            yield
    except Exception as error:  # torch raises anything from RuntimeError to AssertionError here
        if lack := out_of_memory(error):
            raise lack from error
        raise LoweringError(
            f"torch.export could not trace `{name}`",
            why=str(error).strip().split("\n")[0],
            hint="write the module without Python control flow that depends on the values of tensors",
        ) from error


def as_program(name: str, exported: ExportedProgram, outputs: Sequence[str] = ()) -> Program:
    """Wrap an exported graph as a program; the signature is read from the graph.

    Args:
        name: of the program.
        outputs: a name for each output; empty: the names in the graph.

    Raises:
        ValueError: the number of names differs from the number of outputs.
        LoweringError: an input or output is not a tensor, or has a dynamic shape.
    """
    values = {node.name: node.meta.get("val") for node in exported.graph.nodes}
    signature = exported.graph_signature
    arguments, returned = signature.user_inputs, signature.user_outputs
    names = tuple(outputs) or tuple(str(node) for node in returned)
    if len(names) != len(returned):
        raise ValueError(f"`{name}` returns {len(returned)} tensors; {len(names)} names were given")
    spec = ProgramSpec(
        name,
        tuple(_tensor_spec(name, str(node), values.get(str(node))) for node in arguments),
        tuple(
            _tensor_spec(name, label, values.get(str(node)))
            for label, node in zip(names, returned, strict=True)
        ),
    )
    return Program(exported, spec)


def written_buffer(program: Program) -> str | None:
    """Return the name of a buffer that the program writes to, also through a view; or None.

    A tensor that is an attribute of the module, such as a cache of transformers, counts as a buffer.
    """
    signature = program.exported.graph_signature
    for name in signature.buffers_to_mutate.values():  # where operators were decomposed
        return str(name)
    buffers = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    return next((str(buffers[n]) for n in _written(program.exported) if n in buffers), None)


def written_input(program: Program) -> str | None:
    """Return the name of an input that the program writes to, also through a view; or None."""
    signature = program.exported.graph_signature
    for name in signature.user_inputs_to_mutate.values():
        return str(name)
    input_names = {str(name) for name in signature.user_inputs}
    return next((name for name in _written(program.exported) if name in input_names), None)


def _written(exported: ExportedProgram) -> Iterator[str]:
    """Yield the names of placeholders whose memory an in-place operator changes."""
    return (node.name for node in memory_written(exported.graph) if node.op == "placeholder")


def _tensor_spec(program: str, name: str, value: object) -> TensorSpec:
    if not isinstance(value, Tensor):
        raise LoweringError(
            f"`{name}` of program `{program}` is not a tensor",
            why=f"its type is {type(value).__name__}; inputs and outputs must be tensors",
            hint="pass and return tensors only; make constants part of the module",
        )
    if not all(isinstance(size, int) for size in value.shape):
        raise LoweringError(
            f"`{name}` of program `{program}` has the dynamic shape {tuple(value.shape)}",
            why="accelerators support static shapes only",
            hint="export again without `dynamic_shapes`",
        )
    return TensorSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
