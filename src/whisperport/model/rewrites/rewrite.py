"""Define, register and run graph-to-graph rewrites. Each has a file of its own, also a short one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.fx import GraphModule, Node, map_arg

from whisperport.errors import LoweringError
from whisperport.model.rewrites.graph_edits import aten
from whisperport.model.trace.program import Program, as_program
from whisperport.model.trace.writes import is_view, written_by
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


def remove_writes(module: GraphModule) -> None:
    """Replace each write to a tensor that no view, input or stored tensor shares by its functional form.

        before   y = x + 1 ──► y.mul_(m) ──► y (the same memory)
        after    y = x + 1 ──► z = y * m ──► z

    Why: a rewrite replaces one node and looks at its inputs and its users. A write changes a tensor that
    other nodes read too, so that the replaced node would be written to, or be read before the write.
    """
    for node in list(module.graph.nodes):
        match written_by(node):
            case [tensor] if tensor is node.args[0] and _is_alone(tensor):
                if functional := _functional(node):
                    node.target = functional
                    for user in [user for user in tensor.users if user > node]:
                        user.replace_input_with(tensor, node)


def _is_alone(node: Node) -> bool:
    """Whether `node` computes a tensor that no other node shares, except those that write to it."""
    views = (user for user in node.users if is_view(user) and node not in written_by(user))
    return node.op == "call_function" and not is_view(node) and not any(views)


def _functional(node: Node) -> torch._ops.OpOverload | None:
    """Return the operator that computes what `node` writes, if its result has the same shape and dtype."""
    packet, overload = node.target._schema.name, node.target._overloadname  # type: ignore[union-attr]
    name = packet.removeprefix("aten::")
    functional = getattr(getattr(aten, name.removesuffix("_"), None), overload, None)
    if not name.endswith("_") or functional is None or functional._schema.is_mutable:
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    try:
        result = functional(*args, **kwargs)
    except (RuntimeError, TypeError):  # the functional form has other arguments
        return None
    same = (result.shape, result.dtype) == (node.meta["val"].shape, node.meta["val"].dtype)
    return functional if same else None
