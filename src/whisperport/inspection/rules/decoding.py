"""WP6xx: warnings about work that a decoder repeats for every token.

`weight_inputs` tells which inputs of an HLO module are weights, which the module does not state.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from whisperport.inspection.cost import contracted
from whisperport.inspection.graph import Graph, Node, Value
from whisperport.inspection.rules.base import Finding, format_shape, rule
from whisperport.inspection.rules.shapes import MATMULS
from whisperport.inspection.written_views import VIEWS
from whisperport.program.dims import KNOWN_VOCABULARIES
from whisperport.program.spec import Limit

Dependencies = Mapping[str, frozenset[str]]
"""Name of a tensor -> names of the inputs that it depends on. Weights depend on none."""

# Operators whose result has the elements of their first input, in another order or dtype.
LAYOUT_OPS = frozenset({"clone", "expand", "reshape", "squeeze", "to", "transpose", "unsqueeze"})


# Operators that write a part of a tensor, or select from two -> which of their inputs is the old tensor.
WRITES = {"slice_scatter": (0,), "scatter": (0,), "where": (1, 2)}
MOVES = LAYOUT_OPS | {"gather"}  # their first input; a gather reorders the rows of beams


@dataclass(frozen=True, slots=True)
class _Projection:
    """A matmul with a weight."""

    node: Node
    weight: int  # place of the weight among the node's inputs
    inputs: frozenset[str]  # of the program, that the other operand depends on

    @property
    def rows(self) -> int:
        """Number of rows that are multiplied by the weight."""
        size = self.node.tensors[self.weight].size or 1
        return (self.node.output.size or 0) * contracted(self.node) // max(1, size)

    @property
    def gflop(self) -> float:
        return 2 * (self.node.output.size or 0) * contracted(self.node) / 1e9

    @property
    def megabytes(self) -> float:
        values = (*self.node.tensors, *self.node.outputs)
        return sum(value.n_bytes or 0 for value in values) / 1e6


@rule("WP601", "A decoder projects the encoder's output again for every token", "split (`export`)")
def projected_again(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """The cross-attention of a decoder multiplies the encoder's output by the weights of its keys and
    values. The result is the same for every token of a window. A decoder with the encoder's output as an
    input computes it again for every token, and the caller passes the complete output each time: 1,500 rows
    in a window of 30 s. In Whisper large-v3-turbo, the eight projections need 39 GFLOP (19.7 billion
    multiply-accumulates) per token, and the encoder's output has 7.68 MB in float32.

    The check finds a matmul with a stored weight that depends on one input only and has more rows than the
    decoder has tokens. This is a warning: the node runs on the target, but at every token. Bytes are those
    of the matmul's operands and result.

    Exporters remove computations whose results are not used. A decoder that projects the encoder's output
    and then overwrites the keys and values with its cache contains no projection after the export: only an
    unused input may remain (WP602).

    An HLO module does not state which parameters are weights: an input counts as one if it is multiplied by
    a computed tensor without batch axes, or is the second operand of a matmul of two inputs. The
    body of a `while` or `conditional` is not searched.

    What to do: split the decoder. One program computes the keys and values of all layers, once per window.
    The decoder takes them as inputs and has no input for the encoder's output. `whisperport export` writes
    these programs as `cross_kv` and `step`: `whisperport export CHECKPOINT --target TARGET --out DIR`.
    """
    again: dict[str, list[_Projection]] = {}
    for found in _repeated(graph):
        again.setdefault(next(iter(found.inputs)), []).append(found)
    for name, projections in again.items():
        for found in projections:
            yield Finding(found.node.name, _reason(found, name, projections), found.node)


@rule("WP602", "An input is not used", "remove the input")
def unused_input(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """Nothing that the program returns depends on this input, yet the caller prepares and transfers it at
    every call. Some compilers remove such an input or warn about it ("received an input tensor that was
    unused"), so that the compiled program has fewer inputs than the original.

    The usual case is a decoder with cached cross-attention keys and values: it keeps an input for the
    encoder's output, which only the first call needs. A dummy of the same shape still costs its transfer.

    Tracers that begin at the outputs, such as PyTorch/XLA, remove the input themselves. Then this check
    finds nothing, although the caller may still pass it.

    What to do: remove the input, and export the program again.
    """
    read = {value.name for node in graph.nodes for value in node.tensors}
    read |= {value.name for value in graph.outputs}
    for value in graph.inputs:
        if value.name not in read:
            size = f", {value.n_bytes / 1e6:.2f} MB per call" if value.n_bytes else ""
            reason = f"input of shape {format_shape(value.shape)}{size}: nothing reads it"
            yield Finding(value.name, reason)


@rule("WP603", "A cache is copied by every call, because it is not aliased", "alias the output")
def copied_state(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """The program takes a cache as an input and returns it with a few new rows. An HLO module states in its
    `input_output_alias` which output is written to the memory of which input. Without an alias, the device
    keeps two caches, and every call copies the complete cache to write one row. A runtime that returns
    outputs to the host also transfers the cache to the host and back.

    The check finds an output that is an input of the same shape and dtype, unchanged or with a part
    written over, without an alias. Only HLO modules state aliases, so other formats are not checked.

    What to do: state the alias when the program is traced: `donate_argnums` of `jax.jit`, or the argument
    of the vendor's tracer. Do not return a cache that the program does not change, such as the keys and
    values of the cross-attention.
    """
    if graph.format != "hlo":
        return
    inputs = {value.name: value for value in graph.inputs}
    for place, output in enumerate(graph.outputs):
        state = inputs.get(_state_of(graph, output, inputs))
        if state is None or graph.aliases.get(place) == state.name:
            continue
        size = f", {state.n_bytes / 1e6:.3g} MB" if state.n_bytes else ""
        how = "unchanged" if output.name == state.name else "with a part written over"
        reason = (
            f"input of shape {format_shape(state.shape)}{size} is returned {how} as output {place}, which "
            "is not aliased to it"
        )
        yield Finding(state.name, reason)


@rule("WP604", "The program keeps state in a buffer", "cache as an input")
def kept_state(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """The program writes to a tensor that it stores, such as the static cache of a decoder: the next call
    depends on this one. Most compilers drop such a write without an error, or store the tensor as a
    constant. `whisperport lower` and `check --fix` reject the program, because a comparison of one call
    does not show it.

    The check finds an operator of torch that writes to a stored tensor in place, also through a view, and a
    stored tensor that the program returns with other values.

    What to do: pass the cache to the program as an input, and return the new rows or the new cache as an
    output. The caller keeps it. A program of `whisperport export` has this form.
    """
    known = {value.name for value in graph.inputs}
    stored: dict[str, str] = {}  # tensor -> name of the stored tensor whose memory it has
    found: set[str] = set()
    for node in graph.nodes if graph.format == "torch" else ():
        for value in node.tensors:
            written = not value.constant and value.name not in known
            if value.constant or written:
                stored.setdefault(value.name, value.name)
            if written and value.name not in found:
                found.add(value.name)
                yield Finding(value.name, f"the buffer `{value.name}` is written by every call")
        known.update(value.name for value in node.outputs)
        source = stored.get(node.tensors[0].name, "") if node.tensors else ""
        if source and node.in_place and source not in found:
            found.add(source)
            yield Finding(node.name, f"{node.op} writes to the stored tensor `{source}`", node)
        if source and (node.in_place or node.op in VIEWS):
            stored[node.output.name] = source


def is_whisper_decoder(graph: Graph) -> bool:
    """Return whether a program returns logits of one of Whisper's vocabularies."""
    shapes = (value.shape for value in graph.outputs)
    return any(shape and shape[-1] in KNOWN_VOCABULARIES for shape in shapes)


def _repeated(graph: Graph) -> Iterator[_Projection]:
    """Yield the projections of one input that have more rows than those that read other inputs too."""
    weights = weight_inputs(graph) if graph.format == "hlo" else frozenset()
    depends = _dependencies(graph, weights)
    projections = [found for node in graph.nodes if (found := _projection(node, depends))]
    rows_of_tokens: dict[
        str, int
    ] = {}  # input -> rows of the projections that read other inputs too
    for found in projections:
        for name in found.inputs if len(found.inputs) > 1 else ():
            rows_of_tokens[name] = max(rows_of_tokens.get(name, 0), found.rows)
    for found in projections:
        name = next(iter(found.inputs)) if len(found.inputs) == 1 else ""
        if name in rows_of_tokens and found.rows > rows_of_tokens[name]:
            yield found


def _dependencies(graph: Graph, weights: frozenset[str]) -> Dependencies:
    depends = {
        value.name: frozenset({value.name}) for value in graph.inputs if value.name not in weights
    }
    for node in graph.nodes:
        given = (depends.get(value.name, frozenset()) for value in node.tensors)
        together: frozenset[str] = frozenset().union(*given)
        depends.update({value.name: together for value in node.outputs})
    return depends


def _projection(node: Node, depends: Dependencies) -> _Projection | None:
    """Return a matmul as a projection; None if neither or both of its operands are weights."""
    if node.op not in MATMULS or len(node.tensors) < 2 or node.output.size is None:
        return None
    left, right = (depends.get(value.name, frozenset()) for value in node.tensors[:2])
    if bool(left) == bool(right):
        return None
    return _Projection(node, 1 if left else 0, left | right)


def _reason(found: _Projection, name: str, projections: list[_Projection]) -> str:
    left, right = (format_shape(value.shape) for value in found.node.tensors[:2])
    text = (
        f"{found.node.op} {left} by {right} reads only `{name}`, which is the same for every token of a "
        f"window: {found.gflop:.2g} GFLOP and {found.megabytes:.3g} MB per token"
    )
    if len(projections) == 1:
        return text
    gflop = sum(one.gflop for one in projections)
    megabytes = sum(one.megabytes for one in projections)
    return f"{text}; all {len(projections)} of `{name}`: {gflop:.3g} GFLOP and {megabytes:.3g} MB"


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
        given = inputs.get(value.name)
        if given and written and (given.shape, given.dtype) == (output.shape, output.dtype):
            return given.name
        node = graph.producer(value)
        if node is None or not node.tensors:
            continue
        writes = node.op in WRITES
        places = WRITES.get(node.op, (0,) if node.op in MOVES else ())
        old = (node.tensors[place] for place in places if place < len(node.tensors))
        waiting += [(one, written or writes) for one in old]
    return ""


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
