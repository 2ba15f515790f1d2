"""WP2xx: dtypes of activations, and the scales of quantized tensors."""

from collections.abc import Set

from whisperport.model.inspection.graph import Graph, Node
from whisperport.model.inspection.rules.rule import node_rule


@node_rule("WP211", "A quantized tensor has one scale per channel")
def per_channel(graph: Graph, node: Node, operators: Set[str]) -> str:
    """One scale for each output channel is more accurate than one for the complete weight, but the
    accelerator reads it for some operators only.

    What to do: quantize the tensors of this operator with one scale each, or do not quantize the operator.
    """
    if node.op in operators:
        return ""
    counts = [v.quantization.scales for v in (*node.tensors, *node.outputs) if v.quantization]
    if max(counts, default=1) < 2:
        return ""
    supported = ", ".join(sorted(operators)) or "none"
    return f"{node.op} on a tensor with {max(counts)} scales; one per channel: {supported} only"


@node_rule("WP212", "An activation has an unsupported dtype")
def activation_dtype(graph: Graph, node: Node, dtypes: Set[str]) -> str:
    """The accelerator computes in few dtypes. 64-bit integers and booleans may be stored in the file, for
    example as a shape or an axis, but no node may compute with them.

    What to do: compute positions, indices and masks on the host, and pass the mask as floating-point
    numbers that are added to the scores.
    """
    for value in (*node.tensors, *node.outputs):
        if value.dtype and not value.constant and value.dtype not in dtypes:
            return f"{node.op} on {value.dtype}; the target computes in {', '.join(sorted(dtypes))}"
    return ""


@node_rule("WP213", "A tensor of 16-bit integers is not symmetric with one scale")
def symmetric_16_bit(graph: Graph, node: Node, _: None) -> str:
    """The accelerator reads 16-bit activations only if the zero point is 0, and if the complete tensor has
    one scale. Quantizers for 16-bit activations write this form by default.

    What to do: quantize activations of 16 bits symmetrically, with one scale per tensor.
    """
    for value in (*node.tensors, *node.outputs):
        stated = value.quantization
        if value.dtype != "int16" or stated is None:
            continue
        if stated.scales > 1:
            return f"{node.op} on int16 with {stated.scales} scales; supported: one scale"
        if not stated.symmetric:
            return f"{node.op} on int16 with a zero point that is not 0; supported: 0"
    return ""


@node_rule("WP214", "16-bit activations with 8-bit weights are not supported")
def mixed_16_and_8_bit(graph: Graph, node: Node, _: None) -> str:
    """The accelerator does not support a matmul with activations of 16 bits and weights of 8 bits (w8a16).

    What to do: keep the program in floating point, or quantize activations and weights to 8 bits (w8a8) and
    check the accuracy. The activations of Whisper's encoder have outliers, for which 8 bits are not enough.
    """
    wide = any(value.dtype == "int16" and not value.constant for value in node.tensors)
    narrow = any(value.dtype == "int8" and value.constant for value in node.tensors)
    return f"{node.op} of int16 activations with int8 weights" if wide and narrow else ""
