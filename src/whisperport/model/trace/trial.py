"""Run a program in torch on random inputs, to compare it with its lowered or rewritten form."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from whisperport.errors import ProgramError
from whisperport.model.trace.program import Program, written_buffer, written_input
from whisperport.system.child import first_line


def check_comparable(program: Program, *, as_arrays: bool) -> None:
    """Check that one run of a program can be compared with one run of another form of it.

    Args:
        as_arrays: the other form runs on numpy arrays.

    Raises:
        ProgramError: the program writes to a buffer or to an input; or, with `as_arrays`, an input or
            output is bfloat16.
    """
    for tensor in (*program.spec.inputs, *program.spec.outputs):
        if as_arrays and tensor.dtype == "bfloat16":
            raise ProgramError(
                f"`{tensor.name}` of program `{program.name}` is bfloat16",
                why="numpy has no bfloat16, so the two forms cannot be run on the same arrays",
                hint="convert inputs and outputs to float32 in the module, or the module with `.float()`",
            )
    if buffer := written_buffer(program):
        raise ProgramError(
            f"`{program.name}` keeps state in a buffer, `{buffer}`",
            why="compilers drop such state silently, and a comparison of one run does not detect it",
            hint="pass the state as an input and return it as an output",
        )
    if name := written_input(program):
        raise ProgramError(
            f"`{program.name}` writes to its input `{name}`",
            why="compilers do not support a change of the caller's array",
            hint="copy the input first, and return the changed copy as an output",
        )


def random_inputs(program: Program, seed: int) -> list[Tensor]:
    """Return random inputs in the order of the signature.

    Floats are normally distributed. Integers that index an embedding are within its table. All other
    integers are the example inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    nodes = {node.name: node for node in program.exported.graph.nodes}
    names = program.exported.graph_signature.user_inputs
    examples = pytree.tree_leaves(program.exported.example_inputs)
    return [
        _random(nodes[str(name)], example, generator)
        for name, example in zip(names, examples, strict=True)
    ]


def eager_outputs(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run the graph in torch, and return the outputs in the order of the signature.

    Args:
        inputs: in the order of the signature.

    Raises:
        ProgramError: torch cannot run the graph, or cannot allocate the memory for it.
    """
    args, kwargs = pytree.tree_unflatten(list(inputs), program.exported.call_spec.in_spec)
    try:
        with torch.no_grad():
            outputs = program.exported.module(check_guards=False)(*args, **kwargs)
    except (RuntimeError, IndexError, MemoryError) as error:
        raise ProgramError(
            f"torch cannot run the program `{program.name}`",
            why=first_line(error),
            hint="if it needs more memory and you trust its source, `--trust` runs it without a limit",
        ) from error
    return [output.detach() for output in pytree.tree_leaves(outputs)]


def _random(node: Node, example: Tensor, generator: torch.Generator) -> Tensor:
    if example.dtype == torch.bool:
        return torch.rand(example.shape, generator=generator) < 0.5
    if example.dtype.is_floating_point:
        return torch.randn(example.shape, generator=generator).to(example.dtype)
    rows = min(_tables_read(node), default=0)
    if not rows:
        return example  # not an index of a table: its valid range is not known
    return torch.randint(rows, example.shape, generator=generator).to(example.dtype)


def _tables_read(node: Node) -> Iterator[int]:
    """Yield the number of rows of every embedding that `node` indexes, also through reshapes and casts."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        for user in current.users:
            if user.target is torch.ops.aten.embedding.default:
                table: Any = user.args[0]
                if user.args[1] is current:
                    yield int(table.meta["val"].shape[0])
            elif user not in seen and _size(user) == _size(node):
                seen.add(user)
                pending.append(user)


def _size(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else None
