"""WP6xx: warnings about work that a decoder repeats for every token."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from whisperport.model.inspection.cost import contracted
from whisperport.model.inspection.graph import Graph, Node
from whisperport.model.inspection.rules.rule import Finding, format_shape, rule
from whisperport.model.inspection.rules.tensors import MATMULS
from whisperport.model.inspection.written_views import VIEWS
from whisperport.program.dims import KNOWN_VOCABULARIES
from whisperport.program.spec import Limit

Dependencies = Mapping[str, frozenset[str]]
"""Name of a tensor -> names of the inputs that it depends on. Weights depend on none."""


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
    values: the result is the same for every token of a window. A decoder with the encoder's output as
    an input computes it again for every token, and the caller passes 1,500 rows each time, in a window
    of 30 s. In Whisper large-v3-turbo, the eight projections need 39 GFLOP (19.7 billion
    multiply-accumulates) per token, and the encoder's output has 7.68 MB in float32.

    The check finds a matmul with a stored weight that depends on one input only and has more rows than
    the decoder has tokens. The node runs on the target, but at every token. Bytes are those of the
    matmul's operands and result.

    Exporters remove computations whose results are not used. A decoder that projects the encoder's
    output and then overwrites the keys and values with its cache contains no projection after the
    export: only an unused input may remain (WP602).

    What to do: split the decoder. One program computes the keys and values of all layers, once per
    window. The decoder takes them as inputs and has no input for the encoder's output:
    `whisperport export CHECKPOINT --target TARGET --out DIR` writes `cross_kv` and `step`.
    """
    again: dict[str, list[_Projection]] = {}
    for projection in _repeated(graph):
        again.setdefault(next(iter(projection.inputs)), []).append(projection)
    for name, projections in again.items():
        for projection in projections:
            yield Finding(
                projection.node.name, _reason(projection, name, projections), projection.node
            )


@rule("WP602", "An input is not used", "remove the input")
def unused_input(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """Nothing that the program returns depends on this input, yet the caller prepares and transfers it
    at every call. Some compilers remove such an input or warn about it ("received an input tensor that
    was unused"), so that the compiled program has fewer inputs than the original.

    The usual case is a decoder with cached cross-attention keys and values: it keeps an input for the
    encoder's output, which only the first call needs. Tracers that begin at the outputs, such as
    PyTorch/XLA, remove the input themselves. Then this check finds nothing.

    What to do: remove the input, and export the program again.
    """
    read = {value.name for node in graph.nodes for value in node.tensors}
    read |= {value.name for value in graph.outputs}
    for value in graph.inputs:
        if value.name not in read:
            size = f", {value.n_bytes / 1e6:.2f} MB per call" if value.n_bytes else ""
            reason = f"input of shape {format_shape(value.shape)}{size}: nothing reads it"
            yield Finding(value.name, reason)


@rule("WP604", "The program keeps state in a buffer", "cache as an input")
def kept_state(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """The program writes to a tensor that it stores, such as the static cache of a decoder: the next
    call depends on this one. Most compilers drop such a write without an error, or store the tensor as
    a constant. `whisperport lower` and `fix` reject the program, because a comparison of one call does
    not show it.

    The check finds an operator of torch that writes to a stored tensor in place, also through a view,
    and a stored tensor that the program returns with other values.

    What to do: pass the cache to the program as an input, and return the new rows or the new cache as
    an output. The caller keeps it. A program of `whisperport export` has this form.
    """
    known = {value.name for value in graph.inputs}
    stored: dict[str, str] = {}  # tensor -> name of the stored tensor whose memory it has
    names: set[str] = set()
    for node in graph.nodes if graph.format == "torch" else ():
        for value in node.tensors:
            written = not value.constant and value.name not in known
            if value.constant or written:
                stored.setdefault(value.name, value.name)
            if written and value.name not in names:
                names.add(value.name)
                yield Finding(value.name, f"the buffer `{value.name}` is written by every call")
        known.update(value.name for value in node.outputs)
        source = stored.get(node.tensors[0].name, "") if node.tensors else ""
        if source and node.in_place and source not in names:
            names.add(source)
            yield Finding(node.name, f"{node.op} writes to the stored tensor `{source}`", node)
        if source and (node.in_place or node.op in VIEWS):
            stored[node.output.name] = source


def is_whisper_decoder(graph: Graph) -> bool:
    """Return whether a program returns logits of one of Whisper's vocabularies."""
    shapes = (value.shape for value in graph.outputs)
    return any(shape and shape[-1] in KNOWN_VOCABULARIES for shape in shapes)


def _repeated(graph: Graph) -> Iterator[_Projection]:
    """Yield the projections of one input that have more rows than those that read other inputs too."""
    depends = _dependencies(graph)
    projections = [projection for node in graph.nodes if (projection := _projection(node, depends))]
    # Input -> rows of the projections that read other inputs too.
    rows_of_tokens: dict[str, int] = {}
    for projection in projections:
        for name in projection.inputs if len(projection.inputs) > 1 else ():
            rows_of_tokens[name] = max(rows_of_tokens.get(name, 0), projection.rows)
    for projection in projections:
        name = next(iter(projection.inputs)) if len(projection.inputs) == 1 else ""
        if name in rows_of_tokens and projection.rows > rows_of_tokens[name]:
            yield projection


def _dependencies(graph: Graph) -> Dependencies:
    depends = {value.name: frozenset({value.name}) for value in graph.inputs}
    for node in graph.nodes:
        sets = (depends.get(value.name, frozenset()) for value in node.tensors)
        together: frozenset[str] = frozenset().union(*sets)
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


def _reason(projection: _Projection, name: str, projections: list[_Projection]) -> str:
    left, right = (format_shape(value.shape) for value in projection.node.tensors[:2])
    text = (
        f"{projection.node.op} {left} by {right} reads only `{name}`, which is the same for every token of "
        f"a window: {projection.gflop:.2g} GFLOP and {projection.megabytes:.3g} MB per token"
    )
    if len(projections) == 1:
        return text
    gflop = sum(p.gflop for p in projections)
    megabytes = sum(p.megabytes for p in projections)
    return f"{text}; all {len(projections)} of `{name}`: {gflop:.3g} GFLOP and {megabytes:.3g} MB"
