"""WP1xx: operators that the target does not support."""

from collections.abc import Set

from whisperport.model.inspection.graph import Graph, Node
from whisperport.model.inspection.rules.rule import node_rule


@node_rule("WP101", "The target does not support the operator")
def not_supported(graph: Graph, node: Node, operators: Set[str]) -> str:
    """A compiler for an accelerator supports a list of operators. A node with any other operator runs on
    the CPU. Each such node in the middle of a graph splits the accelerator's subgraph in two, and data is
    copied out of the accelerator and back. Some compilers reject the complete program instead.

    What to do: apply the suggested rewrite, if there is one. Otherwise move the operator to the host,
    before or after the program (token lookup, masks and argmax can run there), or write the layer with
    supported operators.
    """
    if node.custom or node.op in operators:
        return ""
    return f"{_operator_name(node)} is not in the list of supported operators"


@node_rule("WP104", "The operator was not seen in programs known to compile")
def not_seen(graph: Graph, node: Node, operators: Set[str]) -> str:
    """The vendor does not publish which operators its compiler supports, and no program that is known to
    compile contains this operator. It may be supported anyway, so this is not a rejection: such nodes are
    counted separately and do not make `whisperport check` exit with status 1.

    What to do: try the vendor's compiler on a small program with this operator, or write the layer with
    operators that were seen.
    """
    if node.custom or node.op in operators:
        return ""
    return f"{_operator_name(node)} was not seen in programs known to compile"


@node_rule("WP102", "The operator is custom: not a standard operator of torch, ONNX or TFLite")
def custom(graph: Graph, node: Node, domains: Set[str]) -> str:
    """The operator belongs to a library or a vendor, not to torch, ONNX or TFLite. Only that vendor's own
    compiler supports it, and its result and cost are not known to other tools.

    What to do: export again without the option that added the operator (an option of a quantizer or of a
    vendor's converter), or without the library.
    """
    if not node.custom or node.op.rpartition(".")[0] in domains:
        return ""
    supported = f"those of {', '.join(sorted(domains))}" if domains else "none"
    return f"{node.op} is a custom operator; supported custom operators: {supported}"


@node_rule("WP103", "The operator is decomposed, and some of its parts are not supported")
def decomposed(graph: Graph, node: Node, parts: str) -> str:
    """The target does not have this operator, so torch decomposes it into smaller ones. Those that the
    target does not support run on the CPU, between nodes that run on the accelerator.

    The usual case is fused attention (`scaled_dot_product_attention`). torch decomposes it with a test for
    rows whose mask excludes every position: comparisons, `logical_not` and `where`.

    What to do: apply the suggested rewrite, which writes the same function as two matmuls, the addition of
    a finite mask, and a softmax; or load the model with eager attention.
    """
    return f"{node.op} is decomposed, and {parts} are not delegated"


def _operator_name(node: Node) -> str:
    """Return the node's aten name, preceded by the name in the file if that differs."""
    own = node.original_op.removeprefix("aten.").split(".")[0]
    return node.op if own in (node.op, f"_{node.op}") else f"{own} ({node.op})"
