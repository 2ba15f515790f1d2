"""Tell which inputs of an HLO module are weights. An HLO module does not state it."""

from collections import defaultdict
from collections.abc import Iterator

from whisperport.inspection.graph import Graph, Node

# Operators whose result has the elements of their first input, in another order or dtype.
LAYOUT_OPS = frozenset({"clone", "expand", "reshape", "squeeze", "to", "transpose", "unsqueeze"})


def weight_inputs(graph: Graph) -> frozenset[str]:
    """Return the names of the inputs that are used as weights.

    An input is a weight if it is multiplied by a computed tensor in a matmul without batch axes or in a
    convolution. Cached keys and values are multiplied with the heads as batch axes. If two inputs are
    multiplied by each other, such as the encoder's output and the weight of its keys, the weight is the one
    that is a weight elsewhere, or else the one that is multiplied by fewer inputs, or else the second. A
    floating-point input of rank 1 is a weight too, such as a bias. An input whose memory is reused for an
    output is not: it is state.
    """
    vectors = (v for v in graph.inputs if len(v.shape or ()) == 1 and "float" in v.dtype)
    found = {value.name for value in vectors}
    pairs = list(_operands(graph))
    found.update(left or right for left, right in pairs if not left or not right)
    partners: dict[str, set[str]] = defaultdict(set)
    both = [(left, right) for left, right in pairs if left and right]
    for left, right in both:
        partners[left].add(right)
        partners[right].add(left)
    for left, right in both:
        if left not in found and right not in found:
            found.add(left if len(partners[left]) < len(partners[right]) else right)
    return frozenset(found - {"", *graph.aliases.values()})


def _operands(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield the operands of each matmul and convolution: the name of the input that one is, or ""."""
    sources = {value.name: value.name for value in graph.inputs}
    for node in graph.nodes:
        given = [sources.get(value.name, "") for value in node.tensors]
        if node.op in LAYOUT_OPS and given and given[0]:
            sources[node.output.name] = given[0]
        if len(given) > 1 and _has_weight(node):
            yield given[0], given[1]


def _has_weight(node: Node) -> bool:
    return node.op == "conv" or (node.op == "matmul" and not node.attributes.get("lhs_batch"))
