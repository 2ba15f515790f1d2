"""What is wrong with an HLO module: caches that every call copies, and which of its inputs are weights."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from whisperport.model.inspection.graph import Graph, Node, Value
from whisperport.model.inspection.rules import RULES
from whisperport.program.spec import Limit

from .read_hlo import Hlo

# Operators whose result has the elements of their first input, in another order or dtype.
LAYOUT_OPS = frozenset({"clone", "expand", "reshape", "squeeze", "to", "transpose", "unsqueeze"})


# Operators that write a part of a tensor, or select from two -> which of their inputs is the old tensor.
WRITES = {"slice_scatter": (0,), "scatter": (0,), "where": (1, 2)}
MOVES = LAYOUT_OPS | {"gather"}  # their first input; a gather reorders the rows of beams


def broken(graph: Graph, rule: str, value: object = None) -> list[str]:
    """Return what a rule of `whisperport check` finds in a graph."""
    limit = Limit(rule=rule, value=value, source="a test")
    return [finding.reason for finding in RULES[rule].check(graph, limit)]


def projected_again(module: Hlo) -> list[str]:
    """Return what rule WP601 finds. A module does not state which of its inputs are weights."""
    weights = weight_inputs(module)
    inputs = tuple(value for value in module.graph.inputs if value.name not in weights)
    return broken(replace(module.graph, inputs=inputs), "WP601")


def copied_caches(module: Hlo) -> list[str]:
    """Return the inputs that are an output, unchanged or with a part written over, without an alias.

    Without one, the device keeps two caches, and every call copies the complete cache to write one row.
    """
    graph, inputs = module.graph, {value.name: value for value in module.graph.inputs}
    return [
        state
        for place, output in enumerate(graph.outputs)
        if (state := _state_of(graph, output, inputs)) and module.aliases.get(place) != state
    ]


def _state_of(graph: Graph, output: Value, inputs: Mapping[str, Value]) -> str:
    """Return the input of which an output is a new version; empty if there is none."""
    if output.name in inputs:
        return output.name
    seen: set[tuple[str, bool]] = set()
    waiting = [(output, False)]  # a tensor, and whether a part of it was written over
    while waiting:
        value, written = waiting.pop()
        if (value.name, written) in seen:
            continue
        seen.add((value.name, written))
        same = inputs.get(value.name)
        if same and written and (same.shape, same.dtype) == (output.shape, output.dtype):
            return same.name
        node = graph.producer(value)
        if node is None or not node.tensors:
            continue
        writes = node.op in WRITES
        places = WRITES.get(node.op, (0,) if node.op in MOVES else ())
        old = (node.tensors[place] for place in places if place < len(node.tensors))
        waiting += [(tensor, written or writes) for tensor in old]
    return ""


def weight_inputs(module: Hlo) -> frozenset[str]:
    """Return the names of the inputs that are used as weights.

    An input is a weight if it is multiplied by a computed tensor in a matmul without batch axes or in a
    convolution. Cached keys and values are multiplied with the heads as batch axes. If two inputs are
    multiplied by each other, such as the encoder's output and the weight of its keys, the weight is the one
    that is a weight elsewhere, or else the one that is multiplied by fewer inputs, or else the second. A
    floating-point input of rank 1 is a weight too, such as a bias. An input whose memory is reused for an
    output is not: it is state.
    """
    graph = module.graph
    vectors = (v for v in graph.inputs if len(v.shape or ()) == 1 and "float" in v.dtype)
    names = {value.name for value in vectors}
    pairs = list(_operands(graph))
    names.update(left or right for left, right in pairs if not left or not right)
    partners: dict[str, set[str]] = defaultdict(set)
    both = [(left, right) for left, right in pairs if left and right]
    for left, right in both:
        partners[left].add(right)
        partners[right].add(left)
    for left, right in both:
        if left not in names and right not in names:
            names.add(left if len(partners[left]) < len(partners[right]) else right)
    return frozenset(names - {"", *module.aliases.values()})


def _operands(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield the operands of each matmul and convolution: the name of the input that one is, or ""."""
    sources = {value.name: value.name for value in graph.inputs}
    for node in graph.nodes:
        read = [sources.get(value.name, "") for value in node.tensors]
        if node.op in LAYOUT_OPS and read and read[0]:
            sources[node.output.name] = read[0]
        if len(read) > 1 and _has_weight(node):
            yield read[0], read[1]


def _has_weight(node: Node) -> bool:
    return node.op == "conv" or (node.op == "matmul" and not node.attributes.get("has_batch"))
