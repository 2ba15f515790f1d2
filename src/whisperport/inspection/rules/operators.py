"""WP1xx: operators that a target does not have."""

from collections.abc import Set

from whisperport.inspection.graph import Graph, Node
from whisperport.inspection.rules.base import node_rule


@node_rule("WP101", "The target has no such operator")
def not_taken(graph: Graph, node: Node, operators: Set[str]) -> str:
    """A compiler for an accelerator takes a list of operators. A node of any other is left to the
    CPU, and every such node in the middle of a graph cuts the accelerator's part in two: data is
    copied out and in again. Some compilers refuse the whole program instead.

    What to do: apply the rewrite named beside it, if one is; else move the operator to the host,
    before or after the program (token lookup, masks and argmax belong there), or write the layer with
    operators from the list on the target's page.
    """
    if node.custom or node.op in operators:
        return ""
    return f"{_said(node)} is not among the operators it takes"


@node_rule("WP102", "The operator is custom")
def custom(graph: Graph, node: Node, domains: Set[str]) -> str:
    """The operator belongs to a library or a vendor, and not to torch, ONNX or TFLite themselves. No
    compiler but that vendor's own knows it, and there is no telling what it computes or costs.

    What to do: export again without the option that put it there (a quantizer's, a vendor's converter's),
    or without the library.
    """
    if not node.custom or node.op.rpartition(".")[0] in domains:
        return ""
    taken = f"it takes those of {', '.join(sorted(domains))}" if domains else "it takes none"
    return f"{node.op} is a custom operator; {taken}"


@node_rule("WP103", "The operator is taken apart, and some of its parts are not taken")
def taken_apart(graph: Graph, node: Node, parts: str) -> str:
    """The target has no such operator, so the exporter writes it with smaller ones. Some of those the
    target has; the others stay on the CPU, in the middle of what the accelerator could have run.

    Fused attention is the usual case. Exporters write it with a guard for rows that are masked in full:
    comparisons, a logical not, a choice. None of that is arithmetic, and no accelerator has it.

    What to do: apply the rewrite, which writes the same function with products, a sum with a finite mask
    and a softmax; or load the model with eager attention.
    """
    return f"it is taken apart, and {parts} stay outside"


def _said(node: Node) -> str:
    """Our name, and the file's where that is another word."""
    own = node.written.removeprefix("aten.").split(".")[0]
    return node.op if own in (node.op, f"_{node.op}") else f"{own} ({node.op})"
