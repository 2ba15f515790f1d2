"""Graph-to-graph rewrites by name: what one is, how it is registered, how a list of them is run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.fx import GraphModule

from whisperport.errors import LoweringError
from whisperport.programs.program import Program, as_program
from whisperport.spec import Rejection


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rewrite did to one program."""

    rewrite: str
    changed: tuple[str, ...]  # names of the nodes replaced
    rejected: tuple[Rejection, ...]  # nodes of its kind that were left alone, and why


Apply = Callable[..., tuple[list[str], list[Rejection]]]
"""Edit a graph in place; return the names of the nodes replaced, and the refusals.

Called with the graph, and with the number where the rewrite takes one.
"""


@dataclass(frozen=True, slots=True)
class Rewrite:
    name: str
    exact: bool  # the same function in real arithmetic
    apply: Apply
    number: int | None = None  # what `name=NUMBER` replaces; None: the name takes no number


REWRITES: dict[str, Rewrite] = {}


def rewrite(name: str, *, exact: bool, number: int | None = None) -> Callable[[Apply], Apply]:
    """Register a function as the rewrite `name`.

    Args:
        name: kebab case; asked for as `name`, or as `name=NUMBER` where it takes a number.
        exact: it is the same function in real arithmetic.
        number: its number unless one is asked for.
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


def find_rewrite(asked: str) -> Rewrite:
    """The rewrite that `asked` names, `name` or `name=NUMBER`, with that number.

    Raises:
        LoweringError: there is none of that name, or the number is none it can take.
    """
    name, equals, text = asked.partition("=")
    if name not in REWRITES:
        raise LoweringError(
            f"no rewrite is called {name!r}", hint=f"known: {', '.join(sorted(REWRITES))}"
        )
    found = REWRITES[name]
    if not equals:
        return found
    if found.number is None:
        raise LoweringError(f"rewrite `{name}` takes no number; {asked!r} gives it one")
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise LoweringError(f"the number of rewrite `{name}` is {text!r}; expected 1 or more")
    return replace(found, number=int(text))


def run_rewrites(program: Program, names: Sequence[str]) -> tuple[Program, list[Outcome]]:
    """Apply the rewrites `names`, in order; the program given is not changed.

    Raises:
        LoweringError: a name is unknown, or the graph could not be exported again afterwards.
    """
    outcomes: list[Outcome] = []
    for asked, chosen in [(name, find_rewrite(name)) for name in names]:
        program, outcome = _run_one(program, asked, chosen)
        outcomes.append(outcome)
    return program, outcomes


def _run_one(program: Program, asked: str, chosen: Rewrite) -> tuple[Program, Outcome]:
    module = program.exported.module(check_guards=False)
    assert isinstance(module, GraphModule)
    apply = chosen.apply if chosen.number is None else partial(chosen.apply, number=chosen.number)
    changed, rejected = apply(module)
    outcome = Outcome(asked, tuple(changed), tuple(rejected))
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
            f"rewrite `{chosen.name}` broke the program `{program.name}`",
            why=str(error).strip().split("\n")[0],
            hint="this is a defect of whisperport; please report it with the program",
        ) from error
    rewritten = as_program(program.name, exported, [t.name for t in program.spec.outputs])
    assert rewritten.spec == program.spec, "a rewrite changed the signature"
    return rewritten, outcome


def _drop_unread(module: GraphModule) -> None:
    """Forget the weights that no node reads any more, or the next export would write them."""
    read = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    kept = (module.named_parameters, module.named_buffers)
    names = [name for named in kept for name, _ in named(remove_duplicate=False)]
    for name in [name for name in names if name not in read]:
        owner, _, last = name.rpartition(".")
        delattr(module.get_submodule(owner), last)
