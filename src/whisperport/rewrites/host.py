"""Rewrites that move the first or last steps of a program to the host, so that its signature changes.

`fix` and `lower` apply those that a target names; `export` does not, since the signatures of its programs
are what the runtime calls.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule
from torch.fx.graph import CodeGen

from whisperport.errors import LoweringError
from whisperport.host_part import HostPart
from whisperport.programs.program import Program, as_program
from whisperport.rewrites.base import Outcome
from whisperport.spec import ProgramSpec, Rejection


@dataclass(frozen=True, slots=True)
class Moved:
    """What one rewrite moved to the host."""

    host: HostPart
    outputs: tuple[str, ...]  # names of the outputs of the program that is left
    changed: tuple[str, ...]  # names of the nodes that were moved
    rejected: tuple[Rejection, ...]  # nodes of its kind that were not, and why


Move = Callable[[GraphModule, ProgramSpec], Moved]
"""Edit a graph in place, its placeholders and its output included."""

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
    """Apply one host rewrite; the program given is not changed.

    Raises:
        LoweringError: there is none of that name, or the graph could not be exported again.
    """
    if name not in HOST_REWRITES:
        known = ", ".join(sorted(HOST_REWRITES))
        raise LoweringError(f"no host rewrite is called {name!r}", hint=f"known: {known}")
    unlifted = program.exported.module(check_guards=False)
    assert isinstance(unlifted, GraphModule)
    unlifted.graph.set_codegen(CodeGen())  # tensors in and out, without the caller's structure
    module = GraphModule(unlifted, unlifted.graph)
    moved = HOST_REWRITES[name](module, program.spec)
    outcome = Outcome(name, moved.changed, moved.rejected)
    if not moved.changed:
        return program, HostPart(), outcome
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.delete_all_unused_submodules()
    module.recompile()
    given = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    examples = tuple(torch.zeros(value.shape, dtype=value.dtype) for value in given)
    try:
        with torch.no_grad():
            exported = torch.export.export(
                GraphModule(module, module.graph), examples, strict=False
            )
    except Exception as error:
        raise LoweringError(
            f"host rewrite `{name}` broke the program `{program.name}`",
            why=str(error).strip().split("\n")[0],
            hint="this is a defect of whisperport; please report it with the program",
        ) from error
    return as_program(program.name, exported, moved.outputs), moved.host, outcome
