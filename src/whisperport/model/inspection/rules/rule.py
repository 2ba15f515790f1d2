"""Define rules and register them. A rule has a permanent code, a title, a page and a check."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from whisperport.model.inspection.graph import Graph, Node
from whisperport.program.spec import Limit


@dataclass(frozen=True, slots=True)
class Finding:
    """One node, input or output of a program that breaks a limit of a target."""

    name: str  # of the node, input or output; empty: the complete program
    reason: str  # states the value found, the limit and, in short, what to do
    node: Node | None = None
    fixable: bool = True  # False: the limit's suggested rewrite does not apply to this node


Check = Callable[[Graph, Limit], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule, such as WP301."""

    code: str  # permanent
    title: str  # a complete sentence without a full stop
    text: str  # the body of its page: meaning, cause, and a last paragraph "What to do: …"
    check: Check
    instead: str = (
        ""  # what to do, in a few words, where no rewrite does it; empty: only `text` says it
    )

    @property
    def what_to_do(self) -> str:
        """The advice in the last paragraph of `text`, on one line."""
        return " ".join(self.text.partition("What to do: ")[2].split())


RULES: dict[str, Rule] = {}


def rule(code: str, title: str, instead: str = "") -> Callable[[Check], Check]:
    """Register a function as the check of a program; its docstring is the body of the rule's page."""

    def register(check: Check) -> Check:
        if code in RULES:
            raise ValueError(f"two rules have the code {code}")
        RULES[code] = Rule(code, title, inspect.getdoc(check) or "", check, instead)
        return check

    return register


def node_rule(
    code: str, title: str
) -> Callable[[Callable[[Graph, Node, Any], str]], Callable[[Graph, Node, Any], str]]:
    """Register a function as the check of one node; its docstring is the body of the rule's page.

    The function gets the graph, the node and the limit's value. It returns the reason why the node breaks
    the limit, or an empty string.
    """

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


def format_shape(shape: Any) -> str:
    """Format a shape as `(1, 80, 3000)`; `(?)` if the shape is not known."""
    return "(" + ", ".join(map(str, shape)) + ")" if shape is not None else "(?)"
