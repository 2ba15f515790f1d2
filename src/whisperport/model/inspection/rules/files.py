"""WP4xx: the file format. WP5xx: warnings about nodes that the target computes in another way."""

from collections.abc import Iterator, Set
from math import prod
from typing import Any

from whisperport.model.inspection.graph import Graph, Node
from whisperport.model.inspection.rules.rule import Finding, node_rule, rule
from whisperport.program.spec import Limit


@rule("WP401", "The target does not read this ONNX opset")
def opset(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """A vendor's parser reads some versions of ONNX's operator set (the opset) only. Exporters do not
    always write the requested opset, so this check reads it from the file.

    What to do: write the file with an opset that the target reads, for example with `whisperport lower
    --opset`.
    """
    if graph.opset is not None and graph.opset not in limit.value:
        known = ", ".join(map(str, sorted(limit.value)))
        yield Finding("", f"opset {graph.opset}; the target reads opsets {known}")


@rule("WP404", "The ONNX opset was not seen in programs known to compile")
def opset_seen(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """The vendor does not publish which opsets its parser reads, and no program that is known to
    compile has that of this file. It may be supported anyway: it is counted separately and does not
    make `whisperport check` exit with status 1.

    What to do: write an opset that was seen to compile, with `whisperport lower --opset`, or try the
    vendor's parser.
    """
    if graph.opset is not None and graph.opset not in limit.value:
        seen = ", ".join(map(str, sorted(limit.value)))
        yield Finding("", f"opset {graph.opset}; programs known to compile use opsets {seen}")


@rule("WP402", "The target's compiler does not read this format")
def format_read(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """The other findings for this program tell what the target rejects in the same graph, written in a
    format that its compiler reads.

    What to do: export the model again from torch, for this target.
    """
    if graph.format not in limit.value:
        formats = " and ".join(sorted(limit.value))
        yield Finding("", f"the format is {graph.format}; the target reads {formats}")


@node_rule("WP501", "GELU with approximate='tanh' is computed with erf")
def gelu_form(graph: Graph, node: Node, _: Any) -> str:
    """The graph requests the tanh approximation of GELU, and the target computes it with the error
    function (erf). The two differ by up to 4.7e-4 in absolute value. The node is delegated.

    What to do: nothing for Whisper, which was trained with the error function. For a model trained with
    the tanh approximation, verify the outputs of the compiled program, or write the approximation with
    elementary operators.
    """
    form = node.attributes.get("approximate", "none")
    return (
        f"gelu with approximate={form!r} is computed with erf; verify the outputs"
        if form != "none"
        else ""
    )


@node_rule("WP502", "A linear of this batch size is computed as a convolution")
def linear_batch(graph: Graph, node: Node, sizes: Set[int]) -> str:
    """The accelerator computes a linear for a few batch sizes only: the number of rows, which are all
    axes but the last. The compiler replaces any other by a convolution with a kernel of 1 × 1, which
    computes the same function.

    What to do: nothing. If the convolution is rejected, for example because the engine's buffers are
    too small for it, pad the rows to one of these batch sizes.
    """
    shape = node.tensors[0].shape if node.op == "linear" and node.tensors else None
    if not shape or any(isinstance(axis, str) for axis in shape):
        return ""
    rows = prod(int(axis) for axis in shape[:-1])
    if rows in sizes:
        return ""
    listed = ", ".join(map(str, sorted(sizes)))
    return f"linear of {rows} rows is computed as a convolution; as a linear: {listed} rows"
