"""Define, register and run host rewrites: they move the first or last steps of a program to the host.

A host rewrite changes the program's signature. `whisperport fix` and `whisperport lower` apply the
host rewrites that a target names. `whisperport export` does not apply them, because the runtime depends on
the signatures of its programs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule
from torch.fx.graph import CodeGen

from whisperport.errors import LoweringError
from whisperport.model.rewrites.rewrite import Outcome
from whisperport.model.trace.program import Program, as_program
from whisperport.program.host_part import HostPart
from whisperport.program.spec import ProgramSpec, Rejection


@dataclass(frozen=True, slots=True)
class HostRewriteResult:
    """The result of one host rewrite."""

    host: HostPart
    outputs: tuple[str, ...]  # names of the new program's outputs
    changed: tuple[str, ...]  # names of the moved nodes
    rejected: tuple[Rejection, ...]  # nodes of this kind that were not moved, and why


Move = Callable[[GraphModule, ProgramSpec], HostRewriteResult]
"""Edits a graph in place, including its placeholders and its output."""

HOST_REWRITES: dict[str, Move] = {}


def host_rewrite(name: str) -> Callable[[Move], Move]:
    """Register a function as the host rewrite `name`."""

    def register(move: Move) -> Move:
        if name in HOST_REWRITES:
            raise ValueError(f"two host rewrites are called {name!r}")
        HOST_REWRITES[name] = move
        return move

    return register


def run_host_rewrite(program: Program, name: str) -> tuple[Program, HostPart, Outcome]:
    """Apply one host rewrite.

    Args:
        program: is not changed.

    Returns:
        The new program, the steps that the host must run, and the outcome.

    Raises:
        LoweringError: no host rewrite has this name, or torch cannot export the rewritten graph.
    """
    if name not in HOST_REWRITES:
        known = ", ".join(sorted(HOST_REWRITES))
        raise LoweringError(
            f"no host rewrite is called {name!r}", hint=f"known host rewrites: {known}"
        )
    unlifted = program.exported.module(check_guards=False)
    assert isinstance(unlifted, GraphModule)
    unlifted.graph.set_codegen(CodeGen())  # flat tensors as inputs and outputs
    module = GraphModule(unlifted, unlifted.graph)
    moved = HOST_REWRITES[name](module, program.spec)
    outcome = Outcome(name, moved.changed, moved.rejected)
    if not moved.changed:
        return program, HostPart(), outcome
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.delete_all_unused_submodules()
    module.recompile()
    values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    examples = tuple(torch.zeros(value.shape, dtype=value.dtype) for value in values)
    try:
        with torch.no_grad():
            exported = torch.export.export(
                GraphModule(module, module.graph), examples, strict=False
            )
    except Exception as error:
        raise LoweringError(
            f"torch cannot export the program `{program.name}` after the host rewrite `{name}`",
            why=str(error).strip().split("\n")[0],
            hint="this is a defect of whisperport; please report it with the program",
        ) from error
    return as_program(program.name, exported, moved.outputs), moved.host, outcome
