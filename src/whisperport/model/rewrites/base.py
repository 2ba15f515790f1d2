"""Define, register and run graph-to-graph rewrites."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.fx import GraphModule

from whisperport.errors import LoweringError
from whisperport.model.rewrites.in_place import remove_writes
from whisperport.model.trace.program import Program, as_program
from whisperport.program.spec import Rejection


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one rewrite on one program."""

    rewrite: str  # its name, with the number if one was given
    changed: tuple[str, ...]  # names of the nodes replaced
    rejected: tuple[Rejection, ...]  # nodes of this kind that were not changed, and why


Apply = Callable[..., tuple[list[str], list[Rejection]]]
"""Edits a graph in place; returns the names of the replaced nodes, and the nodes not changed and why.

The arguments are the graph and, for a rewrite with a number, `number`.
"""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One rewrite."""

    name: str
    exact: bool  # True: the result is the same function in real arithmetic
    apply: Apply
    number: int | None = None  # default of `name=NUMBER`; None: the rewrite has no number


REWRITES: dict[str, Rewrite] = {}


def rewrite(name: str, *, exact: bool, number: int | None = None) -> Callable[[Apply], Apply]:
    """Register a function as the rewrite `name`.

    Args:
        name: in kebab case. Targets name it as `name`, or as `name=NUMBER` if it has a number.
        exact: the result is the same function in real arithmetic.
        number: default of the number; None: the rewrite has no number.
    """

    def register(apply: Apply) -> Apply:
        if name in REWRITES:
            first = REWRITES[name].apply.__module__
            raise ValueError(
                f"two rewrites are called {name!r}: in {first} and in {apply.__module__}"
            )
        REWRITES[name] = Rewrite(name, exact, apply, number)
        return apply

    return register


def find_rewrite(requested: str) -> Rewrite:
    """Return the rewrite for `name` or `name=NUMBER`, with its number set.

    Raises:
        LoweringError: no rewrite has this name, or the number is not valid.
    """
    name, equals, text = requested.partition("=")
    if name not in REWRITES:
        raise LoweringError(
            f"no rewrite is called {name!r}",
            hint=f"known rewrites: {', '.join(sorted(REWRITES))}",
        )
    entry = REWRITES[name]
    if not equals:
        return entry
    if entry.number is None:
        raise LoweringError(
            f"rewrite `{name}` has no number, but {requested!r} gives one",
            hint=f"write {name!r}",
        )
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise LoweringError(
            f"the number of rewrite `{name}` is {text!r}; expected an integer of 1 or more",
            hint=f"write, for example, {name}={entry.number}",
        )
    return replace(entry, number=int(text))


def run_rewrites(program: Program, names: Sequence[str]) -> tuple[Program, list[Outcome]]:
    """Apply rewrites in order, and return the new program and the outcome of each rewrite.

    Args:
        program: is not changed.
        names: each `name` or `name=NUMBER`.

    Raises:
        LoweringError: a name or number is not valid, or torch cannot export the rewritten graph.
    """
    outcomes: list[Outcome] = []
    for requested, chosen in [(name, find_rewrite(name)) for name in names]:
        program, outcome = _run_one(program, requested, chosen)
        outcomes.append(outcome)
    return program, outcomes


def _run_one(program: Program, requested: str, chosen: Rewrite) -> tuple[Program, Outcome]:
    module = program.exported.module(check_guards=False)
    assert isinstance(module, GraphModule)
    apply = chosen.apply if chosen.number is None else partial(chosen.apply, number=chosen.number)
    remove_writes(module)
    changed, rejected = apply(module)
    outcome = Outcome(requested, tuple(changed), tuple(rejected))
    if not changed:
        return program, outcome
    module.graph.eliminate_dead_code()
    _drop_unread(module)
    module.graph.lint()
    module.recompile()
    args, kwargs = program.exported.example_inputs or ((), {})
    try:
        with torch.no_grad():
            exported = torch.export.export(module, args, kwargs, strict=False)
    except Exception as error:
        raise LoweringError(
            f"torch cannot export the program `{program.name}` after the rewrite `{chosen.name}`",
            why=str(error).strip().split("\n")[0],
            hint="this is a defect of whisperport; please report it with the program",
        ) from error
    rewritten = as_program(program.name, exported, [t.name for t in program.spec.outputs])
    assert rewritten.spec == program.spec, "a rewrite changed the signature"
    return rewritten, outcome


def _drop_unread(module: GraphModule) -> None:
    """Delete weights that no node reads, so that the next export does not write them."""
    read = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    kept = (module.named_parameters, module.named_buffers)
    names = [name for named in kept for name, _ in named(remove_duplicate=False)]
    for name in [name for name in names if name not in read]:
        owner, _, last = name.rpartition(".")
        delattr(module.get_submodule(owner), last)
