"""What a rule is, and how one is registered: a code that stays, a title, a page, and a check."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from whisperport.inspection.graph import Graph, Node
from whisperport.spec import Limit


@dataclass(frozen=True, slots=True)
class Finding:
    """One place where a program breaks a limit of a target."""

    place: str  # the name of a node, an input or an output; empty: the whole program
    reason: str  # states the value met and the limit
    node: Node | None = None
    fixable: bool = True  # the limit's suggested rewrite, if there is one, applies here too


Check = Callable[[Graph, Limit], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    code: str
    title: str  # a whole sentence, without its stop
    text: str  # what it means, why accelerators have it, what to do: the body of its page
    check: Check


RULES: dict[str, Rule] = {}


def rule(code: str, title: str) -> Callable[[Check], Check]:
    """Register a check of a whole program; its docstring is the rule's page."""

    def register(check: Check) -> Check:
        if code in RULES:
            raise ValueError(f"two rules have the code {code}")
        RULES[code] = Rule(code, title, inspect.getdoc(check) or "", check)
        return check

    return register


def node_rule(
    code: str, title: str
) -> Callable[[Callable[[Graph, Node, Any], str]], Callable[[Graph, Node, Any], str]]:
    """Register a check of one node: (graph, node, limit's value) -> the reason; empty if it holds."""

    def register(reason_of: Callable[[Graph, Node, Any], str]) -> Callable[[Graph, Node, Any], str]:
        def check(graph: Graph, limit: Limit) -> Iterator[Finding]:
            for node in graph.nodes:
                if limit.operators and node.op not in limit.operators:
                    continue
                reason = reason_of(graph, node, limit.value)
                if reason:
                    yield Finding(node.name, reason, node)

        check.__doc__ = reason_of.__doc__
        rule(code, title)(check)
        return reason_of

    return register


def shown(shape: Any) -> str:
    """A shape as `(1, 80, 3000)`; `(?)` where it is not known."""
    return "(" + ", ".join(map(str, shape)) + ")" if shape is not None else "(?)"
