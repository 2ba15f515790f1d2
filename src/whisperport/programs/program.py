"""A program: a static torch graph with a name and a signature, ours or a stranger's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from whisperport.errors import LoweringError
from whisperport.spec import ProgramSpec, TensorSpec


@dataclass(frozen=True, slots=True)
class Program:
    """An exported graph and the names, shapes and dtypes by which it is called."""

    exported: ExportedProgram
    spec: ProgramSpec

    @property
    def name(self) -> str:
        return self.spec.name


def trace(
    name: str, module: nn.Module, inputs: tuple[Any, ...], outputs: Sequence[str] = ()
) -> Program:
    """Export `module` with the static shapes of `inputs`.

    Args:
        name: what the program is called in bundles, reports and multi-method files.
        inputs: positional arguments, tensors or lists of tensors; a list's members are named
            `self_k_0`, `self_k_1`, … after the parameter.
        outputs: a name for each output; by default the graph's own.

    Raises:
        LoweringError: torch cannot export it, or its graph has a shape that is not a number.
    """
    with torch.no_grad():
        try:
            exported = torch.export.export(module.eval(), inputs, strict=False)
        except Exception as error:  # torch raises anything from RuntimeError to AssertionError here
            raise LoweringError(
                f"torch.export could not trace `{name}`",
                why=str(error).strip().split("\n")[0],
                hint="the graph must not depend on the values of tensors",
            ) from error
    return as_program(name, exported, outputs)


def as_program(name: str, exported: ExportedProgram, outputs: Sequence[str] = ()) -> Program:
    """Wrap a stranger's exported graph; its signature is read off the graph."""
    values = {node.name: node.meta.get("val") for node in exported.graph.nodes}
    signature = exported.graph_signature
    given, returned = signature.user_inputs, signature.user_outputs
    names = tuple(outputs) or tuple(str(node) for node in returned)
    if len(names) != len(returned):
        raise ValueError(f"`{name}` returns {len(returned)} tensors; {len(names)} names were given")
    spec = ProgramSpec(
        name,
        tuple(_tensor_spec(name, str(node), values.get(str(node))) for node in given),
        tuple(
            _tensor_spec(name, label, values.get(str(node)))
            for label, node in zip(names, returned, strict=True)
        ),
    )
    return Program(exported, spec)


def written_buffer(program: Program) -> str | None:
    """A buffer that the program writes to, directly or through a view; None if it keeps no state."""
    signature = program.exported.graph_signature
    for name in signature.buffers_to_mutate.values():  # where operators were decomposed
        return str(name)
    buffers = signature.inputs_to_buffers
    return next((str(buffers[n]) for n in _written(program.exported) if n in buffers), None)


def written_input(program: Program) -> str | None:
    """An input that the program writes to, directly or through a view; None if it leaves all alone."""
    signature = program.exported.graph_signature
    for name in signature.user_inputs_to_mutate.values():
        return str(name)
    given = {str(name) for name in signature.user_inputs}
    return next((name for name in _written(program.exported) if name in given), None)


def _written(exported: ExportedProgram) -> Iterator[str]:
    """Names of the placeholders whose memory an operator in place writes to."""
    for node in exported.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable or not node.args:
            continue
        written = node.args[0]
        while isinstance(written, Node) and _is_view(written):
            written = written.args[0]
        if isinstance(written, Node) and written.op == "placeholder":
            yield written.name


def _is_view(node: Node) -> bool:
    """Whether what it gives shares memory with its first argument, by the operator's own word."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.target is getitem  # of a list of views
    if node.target.overloadpacket is torch.ops.aten.to and _dtype(node) != _dtype(node.args[0]):  # type: ignore[union-attr]  # an OpOverload: it has a schema
        return False  # the schema speaks for a cast to the same dtype, which copies nothing
    return any(returned.alias_info is not None for returned in schema.returns)


def _dtype(node: object) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dtype if isinstance(value, Tensor) else None


def _tensor_spec(program: str, name: str, value: object) -> TensorSpec:
    if not isinstance(value, Tensor):
        raise LoweringError(
            f"`{program}` has a `{name}` that is no tensor",
            why=f"it is {type(value).__name__}",
            hint="pass and return tensors only; make constants part of the module",
        )
    if not all(isinstance(size, int) for size in value.shape):
        raise LoweringError(
            f"`{program}` has a `{name}` of dynamic shape {tuple(value.shape)}",
            why="accelerators take static shapes",
            hint="export again without `dynamic_shapes`",
        )
    return TensorSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
