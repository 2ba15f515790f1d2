"""WP1xx: operators that a target does not support."""

from collections.abc import Set

from whisperport.inspection.graph import Graph, Node
from whisperport.inspection.rules.base import node_rule


@node_rule("WP101", "The target does not support the operator")
def not_supported(graph: Graph, node: Node, operators: Set[str]) -> str:
    """A compiler for an accelerator supports a list of operators. A node of any other runs on the CPU, and
    every such node in the middle of a graph cuts the accelerator's part in two: data is copied out and in
    again. Some compilers reject the complete program instead.

    What to do: apply the suggested rewrite, if there is one; else move the operator to the host, before or
    after the program (token lookup, masks and argmax belong there), or write the layer with operators from
    the list on the target's page.
    """
    if node.custom or node.op in operators:
        return ""
    return f"{_said(node)} is not in the list of supported operators"


@node_rule("WP104", "The operator was not seen in programs known to compile")
def not_seen(graph: Graph, node: Node, operators: Set[str]) -> str:
    """The vendor does not publish which operators its compiler supports. This one is in no program that is
    known to compile for the target. It may be supported anyway: absence of evidence is no rejection. Such
    nodes are counted separately, are not in the totals of rejected nodes, and do not make
    `whisperport check` exit with status 1.

    What to do: try the vendor's compiler on a small program with this operator, or write the layer with
    operators from the list on the target's page.
    """
    if node.custom or node.op in operators:
        return ""
    return f"{_said(node)} was not seen in programs known to compile"


@node_rule("WP102", "The operator is custom")
def custom(graph: Graph, node: Node, domains: Set[str]) -> str:
    """The operator belongs to a library or a vendor, and not to torch, ONNX or TFLite themselves. No
    compiler but that vendor's own knows it, and there is no telling what it computes or costs.

    What to do: export again without the option that put it there (a quantizer's, a vendor's converter's),
    or without the library.
    """
    if not node.custom or node.op.rpartition(".")[0] in domains:
        return ""
    supported = f"those of {', '.join(sorted(domains))}" if domains else "none"
    return f"{node.op} is a custom operator; supported: {supported}"


@node_rule("WP103", "The operator is decomposed, and some of its parts are not supported")
def taken_apart(graph: Graph, node: Node, parts: str) -> str:
    """The target has no such operator, so the exporter writes it with smaller ones. The target supports
    some of those; the others run on the CPU, in the middle of what the accelerator could have run.

    Fused attention is the usual case. Exporters write it with a guard for rows that are masked in full:
    comparisons, a logical not, a choice. None of that is arithmetic, and no accelerator has it.

    What to do: apply the rewrite, which writes the same function with products, a sum with a finite mask
    and a softmax; or load the model with eager attention.
    """
    return f"it is decomposed, and {parts} are not delegated"


def _said(node: Node) -> str:
    """Our name, and the file's where that is another word."""
    own = node.written.removeprefix("aten.").split(".")[0]
    return node.op if own in (node.op, f"_{node.op}") else f"{own} ({node.op})"
