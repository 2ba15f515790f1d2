"""WP6xx: warnings about work that a decoder repeats for every token."""

from collections.abc import Iterator, Mapping
from math import prod

from whisperport.inspection.graph import Graph, Node, Value
from whisperport.inspection.rules.base import Finding, format_shape, rule
from whisperport.inspection.rules.shapes import MATMULS
from whisperport.spec import Limit

Dependencies = Mapping[str, frozenset[str]]
"""Name of a tensor -> names of the inputs that it depends on. Constants depend on none."""


@rule("WP601", "A decoder projects the encoder's output again for every token")
def projected_again(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """The cross-attention of a decoder multiplies the encoder's output by the weights of its keys and
    values. The encoder's output is the same for every token of a window, and so are the results. A decoder
    that takes the encoder's output as an input computes them for every token, and the caller passes the
    complete encoder's output each time: 1,500 rows in a window of 30 s. In Whisper large-v3-turbo, the
    eight projections need 39 GFLOP (19.7 billion multiply-accumulates) per token, and the encoder's output
    has 7.68 MB in float32.

    The check finds a matmul with a stored weight that depends on one input only and has more rows than the
    decoder has tokens. This is a warning: the node runs on the target, but at every token.

    What to do: split the decoder. One program computes the keys and values of all layers, once per window.
    The decoder takes them as inputs and has no input for the encoder's output. `whisperport export` writes
    these programs as `cross_kv` and `step`.
    """
    depends = _dependencies(graph)
    stored = [node for node in graph.nodes if _has_stored_weight(node, depends)]
    rows_of_tokens: dict[
        str, int
    ] = {}  # input -> rows of the matmuls that read it and other inputs
    for node in stored:
        given = depends[node.output.name]
        for name in given if len(given) > 1 else ():
            rows_of_tokens[name] = max(rows_of_tokens.get(name, 0), _rows(node.output))
    for node in stored:
        given = depends[node.output.name]
        name = next(iter(given)) if len(given) == 1 else ""
        if name in rows_of_tokens and _rows(node.output) > rows_of_tokens[name]:
            yield Finding(node.name, _reason(node, name), node)


@rule("WP602", "An input is not used")
def unused_input(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """Nothing that the program returns depends on this input. The caller prepares and transfers it for
    nothing at every call. Some compilers remove such an input or warn about it ("received an input tensor
    that was unused"), so that the compiled program has fewer inputs than the original.

    A decoder with cached cross-attention keys and values is the usual case: it keeps an input for the
    encoder's output, which only the first call needs.

    What to do: remove the input, and export the program again.
    """
    read = {value.name for node in graph.nodes for value in node.tensors}
    read |= {value.name for value in graph.outputs}
    for value in graph.inputs:
        if value.name not in read:
            size = f", {value.n_bytes / 1e6:.2f} MB per call" if value.n_bytes else ""
            reason = f"input of shape {format_shape(value.shape)}{size}: nothing reads it"
            yield Finding(value.name, reason)


def _dependencies(graph: Graph) -> Dependencies:
    depends = {value.name: frozenset({value.name}) for value in graph.inputs}
    for node in graph.nodes:
        given = (depends.get(value.name, frozenset()) for value in node.tensors)
        together: frozenset[str] = frozenset().union(*given)
        depends.update({value.name: together for value in node.outputs})
    return depends


def _has_stored_weight(node: Node, depends: Dependencies) -> bool:
    return (
        node.op in MATMULS
        and len(node.tensors) > 1
        and not depends.get(node.tensors[1].name)
        and node.output.size is not None
    )


def _rows(value: Value) -> int:
    return prod(int(axis) for axis in (value.shape or ())[:-1])


def _reason(node: Node, name: str) -> str:
    left, right = node.tensors[0].shape, node.tensors[1].shape
    gflop = 2 * (node.output.size or 0) * int((left or (0,))[-1]) / 1e9
    return (
        f"{node.op} {format_shape(left)} by {format_shape(right)} reads only `{name}`, which is the same "
        f"for every token of a window: {gflop:.2g} GFLOP per token"
    )
