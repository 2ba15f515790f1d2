"""WP3xx: operators that a target has, in some forms only."""

from collections.abc import Iterator, Set
from typing import Any

from whisperport.inspection.graph import Graph, Node, Value
from whisperport.inspection.rules.base import Finding, node_rule, rule, shown
from whisperport.spec import Limit


@rule("WP301", "A weight is computed in the graph, where the target supports stored ones only")
def constant_weight(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """The target packs the weight of a product or a convolution when the program is compiled. It can do
    that only with a tensor that is stored in the file. A weight that the graph itself computes, if only
    by transposing a stored one, is not packed, and the whole product stays on the CPU.

    Whisper's logits are the usual case: openai-whisper writes `x @ token_embedding.weight.T`. torch
    exports a transpose and a `matmul`, which becomes `aten.mm` with a computed right side. It is the
    largest product of the decoder.

    What to do: apply the rewrite, or write `F.linear(x, token_embedding.weight)`, which reads the weight
    as it is stored. A product of two activations belongs into `bmm`, which packs nothing.
    """
    for node in graph.nodes:
        if node.op not in limit.operators:
            continue
        if node.op in ("matmul", "mm") and _rank(node.tensors[1]) != 2:
            continue  # a batched product, which packs nothing
        for what, value in zip(("weight", "bias"), node.tensors[1:], strict=False):
            if not value.constant and not _is_decomposed_linear(graph, node, value):
                yield _computed(graph, node, what, value)
                break


def _is_decomposed_linear(graph: Graph, node: Node, weight: Value) -> bool:
    """`addmm` with a transposed weight that `nn.Linear` was decomposed into: seen through, by its class."""
    return (
        node.op in ("addmm", "mm")
        and node.module_type == "torch.nn.modules.linear.Linear"
        and _is_stored_transposed(graph, weight)
    )


def _is_stored_transposed(graph: Graph, value: Value) -> bool:
    maker = graph.producer(value)
    return maker is not None and maker.op == "transpose" and maker.tensors[0].constant


def _computed(graph: Graph, node: Node, what: str, value: Value) -> Finding:
    maker = graph.producer(value)
    origin = f"computed by `{maker.name}` ({maker.op})" if maker else "an input of the program"
    product = "aten.mm" if node.op == "matmul" else node.op  # what torch makes of it
    shapes = f"{shown(node.tensors[0].shape)} by {shown(node.tensors[1].shape)}"
    reason = f"{product} {shapes}: its {what} is {origin}, not a stored constant"
    return Finding(node.name, reason, node, fixable=_is_stored_transposed(graph, value))


def _rank(value: Value) -> int:
    return len(value.shape or ())


@node_rule("WP302", "The operator works along one axis only")
def last_axis(graph: Graph, node: Node, _: Any) -> str:
    """The target has this operator along the last axis and no other.

    What to do: transpose before and after, or drop an `unsqueeze` by a `reshape` to the same shape, which
    the target supports anywhere.
    """
    axes = node.attributes.get("dim")
    axis = axes[0] if isinstance(axes, list) and len(axes) == 1 else axes
    ranks = len(node.output.shape or ())
    if axis in (-1, ranks - 1):
        return ""
    return f"{node.op} along axis {axis} of {ranks}; it has the last only"


@node_rule("WP303", "A mean is taken over other axes than the two of an image")
def image_mean(graph: Graph, node: Node, _: Any) -> str:
    """The target has a mean only as the pooling of an image: over the last two axes of a tensor of rank 4,
    kept with length 1. The mean over the last axis, with which layer normalization is often written, is
    not that.

    What to do: export layer norms whole, as `aten.layer_norm`, for which there is a rewrite; or write the
    mean as a linear whose weights are all 1 / width.
    """
    axes = node.attributes.get("dim")
    ranks = len(node.tensors[0].shape or ())
    normal = sorted(axis % ranks for axis in axes) if isinstance(axes, list) and ranks else axes
    keeps = bool(node.attributes.get("keepdim"))
    if ranks == 4 and normal == [2, 3] and keeps:
        return ""
    kept = "kept" if keeps else "dropped"
    return f"mean over {axes} of rank {ranks}, {kept}; it has [2, 3] of rank 4, kept"


@node_rule("WP304", "A batched product copies both operands before it multiplies")
def copied_operands(graph: Graph, node: Node, _: Any) -> str:
    """torch lowers a `matmul` by a tensor of rank 3 or more to a batched product of rank 3, and puts an
    `expand` before each operand, even where nothing is to expand. The product is taken; the two copies
    are not, so that each attention block leaves the accelerator four times.

    What to do: apply the rewrite, which writes the product as `bmm` on (heads, rows, width).
    """
    left, right = node.tensors[:2]
    if _rank(right) == 1:
        return f"matmul {shown(left.shape)} by the vector {shown(right.shape)} becomes a sum"
    if _rank(right) < 3:
        return ""
    return f"matmul {shown(left.shape)} by {shown(right.shape)} copies both; bmm of rank 3 does not"


@node_rule("WP305", "An argument has a value the target does not have")
def argument(graph: Graph, node: Node, value: tuple[str, Set[str]]) -> str:
    """The target has this operator for some values of an argument only.

    What to do: write it otherwise: a cube as two products, a strided slice as a reshape and a slice.
    """
    name, taken = value
    met = node.attributes.get(name)
    if name == "exponent" and len(node.tensors) > 1:
        met = "a tensor"
    if met is None or str(met) in taken:
        return ""
    return f"{node.op} with {name} {met}; it has {' and '.join(sorted(taken))}"


@node_rule("WP306", "A number stands in arithmetic in a form the target does not take")
def scalar(graph: Graph, node: Node, _: Any) -> str:
    """torch stores the 2 of `x * 2` as an integer tensor and converts it to floating point each time the
    program runs. The product is taken; the conversion, of one number, is not. Where torch took attention
    apart, it leaves `mul.Scalar`, whose number is no tensor at all, and that is not taken.

    What to do: write `x * 2.0`; keep attention whole until it is rewritten.
    """
    if node.written.endswith(".Scalar") and node.op != "rsub":
        return f"{node.written}: a number is supported as a tensor only"
    met = [v for k, v in node.attributes.items() if k in ("other", "self") and type(v) is int]
    floats = node.output.dtype.startswith(("float", "bfloat"))
    return (
        f"{node.op} with the integer {met[0]}; a 2.0 is stored as it is used"
        if met and floats
        else ""
    )


@node_rule("WP307", "A conversion between dtypes")
def conversion(graph: Graph, node: Node, _: Any) -> str:
    """The target converts no dtypes inside a program. A conversion to the dtype that a tensor has already
    is dropped by the compiler, and not meant here.

    What to do: convert weights before the export, and inputs on the host.
    """
    given, made = node.tensors[0].dtype, node.output.dtype
    return f"conversion from {given} to {made}" if given != made else ""


@node_rule("WP308", "A tensor is joined to itself")
def joins_one(graph: Graph, node: Node, _: Any) -> str:
    """The target joins two tensors or more; the compiler counts a tensor that is named twice as one.

    What to do: repeat on the host, or copy one of the two with an operation such as a product by 1.0.
    """
    return f"{node.op} of one tensor" if len({value.name for value in node.tensors}) < 2 else ""


@node_rule("WP309", "A pad cuts instead")
def negative_pad(graph: Graph, node: Node, _: Any) -> str:
    """A pad with a negative width takes elements away, which the target does not do.

    What to do: slice.
    """
    pads = node.attributes.get("pad")
    cut = isinstance(pads, list) and any(isinstance(width, int) and width < 0 for width in pads)
    return f"pad by {pads}; widths must be 0 or more" if cut else ""
