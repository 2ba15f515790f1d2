"""WP4xx and WP5xx: the file as a whole, and what is computed otherwise than asked."""

from collections.abc import Iterator
from typing import Any

from whisperport.inspection.graph import Graph, Node
from whisperport.inspection.rules.base import Finding, node_rule, rule
from whisperport.spec import Limit


@rule("WP401", "The ONNX opset is not one the target reads")
def opset(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """An ONNX file names the version of the operator set it uses. A vendor's parser reads some versions;
    exporters do not always write the version that was asked for, so this is read from the file.

    What to do: write the opset asked for, and read it back from the file.
    """
    if graph.opset is not None and graph.opset not in limit.value:
        known = ", ".join(map(str, sorted(limit.value)))
        yield Finding("", f"opset {graph.opset}; it reads {known}")


@rule("WP404", "The ONNX opset was not seen in programs known to compile")
def opset_seen(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """The vendor does not publish which opsets its parser reads. The opset of this file is not among those
    of programs that are known to compile. It may be supported anyway, so this is no rejection: it is
    counted separately, and does not make `whisperport check` exit with status 1.

    What to do: write one of the opsets that were seen, with `whisperport lower --opset`, or try the
    vendor's parser.
    """
    if graph.opset is not None and graph.opset not in limit.value:
        seen = ", ".join(map(str, sorted(limit.value)))
        yield Finding("", f"opset {graph.opset}; seen to compile: {seen}")


@rule("WP402", "The target's compiler does not read this format")
def format_read(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """The target's compiler starts from another format. What else is said of the program tells what the
    target would make of the same graph in a format that it reads.

    What to do: export the model again, from torch, for this target.
    """
    if graph.format not in limit.value:
        yield Finding("", f"this is {graph.format}; it reads {' and '.join(sorted(limit.value))}")


@node_rule("WP501", "GELU is asked for in its tanh form and computed with erf")
def gelu_form(graph: Graph, node: Node, _: Any) -> str:
    """The target takes the node and leaves its argument out: it computes GELU with the error function
    where the graph asks for the approximation by tanh. The two differ by up to 4.7e-4 in absolute value.
    A warning: the node is delegated.

    What to do: nothing for Whisper, which was trained with the error function. For a model trained with the
    tanh form, verify the outputs of the compiled program, or write the approximation out.
    """
    form = node.attributes.get("approximate", "none")
    return f"gelu with approximate={form!r} is computed with erf" if form != "none" else ""
