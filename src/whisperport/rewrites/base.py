"""Graph-to-graph rewrites by name: what one is, how it is registered, how a list of them is run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule

from whisperport.errors import LoweringError
from whisperport.programs.program import Program, as_program
from whisperport.spec import Refusal


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rewrite did to one program."""

    rewrite: str
    changed: tuple[str, ...]  # names of the nodes replaced
    refused: tuple[Refusal, ...]  # nodes of its kind that were left alone, and why


Apply = Callable[[GraphModule], tuple[list[str], list[Refusal]]]
"""Edit a graph in place; return the names of the nodes replaced, and the refusals."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    name: str
    exact: bool  # the same function in real arithmetic
    apply: Apply


REWRITES: dict[str, Rewrite] = {}


def rewrite(name: str, *, exact: bool) -> Callable[[Apply], Apply]:
    """Register a function as the rewrite `name`."""

    def register(apply: Apply) -> Apply:
        if name in REWRITES:
            first = REWRITES[name].apply.__module__
            raise ValueError(
                f"two rewrites are called {name!r}: in {first} and in {apply.__module__}"
            )
        REWRITES[name] = Rewrite(name, exact, apply)
        return apply

    return register


def run_rewrites(program: Program, names: Sequence[str]) -> tuple[Program, list[Outcome]]:
    """Apply the rewrites `names`, in order; the program given is not changed.

    Raises:
        LoweringError: a name is unknown, or the graph could not be exported again afterwards.
    """
    unknown = [name for name in names if name not in REWRITES]
    if unknown:
        raise LoweringError(
            f"no rewrite is called {unknown[0]!r}", hint=f"known: {', '.join(sorted(REWRITES))}"
        )
    outcomes: list[Outcome] = []
    for name in names:
        program, outcome = _run_one(program, REWRITES[name])
        outcomes.append(outcome)
    return program, outcomes


def _run_one(program: Program, chosen: Rewrite) -> tuple[Program, Outcome]:
    module = program.exported.module(check_guards=False)
    assert isinstance(module, GraphModule)
    changed, refused = chosen.apply(module)
    outcome = Outcome(chosen.name, tuple(changed), tuple(refused))
    if not changed:
        return program, outcome
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    args, kwargs = program.exported.example_inputs or ((), {})
    try:
        with torch.no_grad():
            exported = torch.export.export(module, args, kwargs, strict=False)
    except Exception as error:
        raise LoweringError(
            f"rewrite `{chosen.name}` broke the program `{program.name}`",
            why=str(error).strip().split("\n")[0],
            hint="this is a defect of whisperport; please report it with the program",
        ) from error
    rewritten = as_program(program.name, exported, [t.name for t in program.spec.outputs])
    names = tuple(t.name for t in program.spec.inputs)
    assert tuple(t.name for t in rewritten.spec.inputs) == names, "a rewrite renamed an input"
    return replace(rewritten, spec=program.spec), outcome
