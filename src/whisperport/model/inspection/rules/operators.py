"""WP1xx: operators that the target does not support. WP3xx: operators in forms that it does not support."""

from collections.abc import Iterator, Set
from typing import Any

from whisperport.model.inspection.graph import Graph, Node, Value
from whisperport.model.inspection.rules.rule import Finding, format_shape, node_rule, rule
from whisperport.model.inspection.written_views import WRITTEN
from whisperport.program.spec import Limit


@node_rule("WP101", "The target does not support the operator")
def not_supported(graph: Graph, node: Node, operators: Set[str]) -> str:
    """A node with an operator that the accelerator's compiler does not support runs on the CPU. In the
    middle of a graph it splits the accelerator's subgraph in two, and data is copied out of the
    accelerator and back. Some compilers reject the complete program instead.

    What to do: apply the suggested rewrite, if there is one. Otherwise move the operator to the host,
    before or after the program (token lookup, masks and argmax can run there), or write the layer with
    supported operators.
    """
    if node.custom or node.op in operators:
        return ""
    return f"{_operator_name(node)} is not in the list of supported operators"


@node_rule("WP104", "The operator was not seen in programs known to compile")
def not_seen(graph: Graph, node: Node, operators: Set[str]) -> str:
    """The vendor does not publish which operators its compiler supports, and no program that is known
    to compile contains this operator. It may be supported anyway: such nodes are counted separately and
    do not make `whisperport check` exit with status 1.

    What to do: try the vendor's compiler on a small program with this operator, or write the layer with
    operators that were seen.
    """
    if node.custom or node.op in operators:
        return ""
    return f"{_operator_name(node)} was not seen in programs known to compile"


@node_rule("WP102", "The operator is custom: not a standard operator of torch, ONNX or TFLite")
def custom(graph: Graph, node: Node, domains: Set[str]) -> str:
    """The operator belongs to a library or a vendor. Only that vendor's own compiler supports it, and
    its result and cost are not known to other tools.

    What to do: export again without the option that added the operator (an option of a quantizer or of
    a vendor's converter), or without the library.
    """
    if not node.custom or node.op.rpartition(".")[0] in domains:
        return ""
    supported = f"those of {', '.join(sorted(domains))}" if domains else "none"
    return f"{node.op} is a custom operator; supported custom operators: {supported}"


@node_rule("WP103", "The operator is decomposed, and some of its parts are not supported")
def decomposed(graph: Graph, node: Node, parts: str) -> str:
    """Those of the smaller operators that the target does not support run on the CPU, between nodes
    that run on the accelerator.

    The usual case is fused attention (`scaled_dot_product_attention`), which torch decomposes with a
    test for rows whose mask excludes every position: comparisons, `logical_not` and `where`.

    What to do: apply the suggested rewrite, which writes the same function as two matmuls, the addition
    of a finite mask, and a softmax; or load the model with eager attention.
    """
    return f"{node.op} is decomposed, and {parts} are not delegated"


def _operator_name(node: Node) -> str:
    """Return the node's aten name, preceded by the name in the file if that differs."""
    own = node.original_op.removeprefix("aten.").split(".")[0]
    return node.op if own in (node.op, f"_{node.op}") else f"{own} ({node.op})"


@rule("WP301", "A weight is computed in the graph; the target supports stored weights only")
def constant_weight(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """The target packs the weight of a matmul or a convolution when it compiles the program. A weight
    that the graph computes, even by a transpose only, leaves the complete matmul undelegated: it runs
    on the CPU.

    The usual case is the largest matmul of the decoder, Whisper's logits: openai-whisper writes `x @
    token_embedding.weight.T`, which torch exports as a transpose and a `matmul`.

    What to do: apply the suggested rewrite, or write `F.linear(x, token_embedding.weight)`, which reads
    the weight as it is stored. For a matmul of two activations use `bmm`, which has no packed weight.
    """
    for node in graph.nodes:
        if node.op not in limit.operators:
            continue
        if node.op in ("matmul", "mm") and _rank(node.tensors[1]) != 2:
            continue  # a batched matmul, which has no packed weight
        for what, value in zip(("weight", "bias"), node.tensors[1:], strict=False):
            if not value.constant and not _is_decomposed_linear(graph, node, value):
                yield _computed(graph, node, what, value)
                break


def _is_decomposed_linear(graph: Graph, node: Node, weight: Value) -> bool:
    """Whether the node is the `addmm` or `mm` that an `nn.Linear` was decomposed into.

    The target supports this form although the weight is transposed: it looks at the module's class.
    """
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
    operator = "aten.mm" if node.op == "matmul" else node.op  # torch lowers `matmul` to `aten.mm`
    shapes = f"{format_shape(node.tensors[0].shape)} by {format_shape(node.tensors[1].shape)}"
    reason = f"{operator} {shapes}: its {what} is {origin}, not a stored constant"
    return Finding(node.name, reason, node, fixable=_is_stored_transposed(graph, value))


def _rank(value: Value) -> int:
    return len(value.shape or ())


@node_rule("WP302", "The target supports this operator along the last axis only")
def last_axis(graph: Graph, node: Node, _: Any) -> str:
    """Along any other axis, the node is not delegated.

    What to do: transpose before and after the operator. Replace an `unsqueeze` by a `reshape` to the
    same shape, which the target supports along every axis.
    """
    axes = node.attributes.get("dim")
    axis = axes[0] if isinstance(axes, list) and len(axes) == 1 else axes
    ranks = len(node.output.shape or ())
    if axis in (-1, ranks - 1):
        return ""
    return f"{node.op} along axis {axis} of rank {ranks}; supported: the last axis only"


@node_rule("WP303", "The target supports a mean over the last two axes of a rank-4 tensor only")
def mean_axes(graph: Graph, node: Node, _: Any) -> str:
    """The target supports a mean only as the global pooling of an image, with `keepdim=True`. A layer
    normalization that is written with a mean over the last axis does not have this form.

    What to do: export layer norms as one `aten.layer_norm`, for which there is a rewrite; or write the
    mean as a linear whose weights are all 1 / width.
    """
    axes = node.attributes.get("dim")
    ranks = len(node.tensors[0].shape or ())
    normal = sorted(axis % ranks for axis in axes) if isinstance(axes, list) and ranks else axes
    keeps = bool(node.attributes.get("keepdim"))
    if ranks == 4 and normal == [2, 3] and keeps:
        return ""
    return (
        f"mean over axes {axes} of rank {ranks}, keepdim={keeps}; "
        "supported: axes [2, 3] of rank 4, keepdim=True"
    )


@node_rule("WP304", "A batched matmul copies both operands")
def copied_operands(graph: Graph, node: Node, _: Any) -> str:
    """torch lowers a `matmul` with a right operand of rank 3 or more to a `bmm` of rank 3 with an
    `expand` before each operand, even if there is nothing to expand. The `bmm` is delegated, the two
    copies that `expand` makes are not, so each attention block leaves the accelerator four times.

    What to do: apply the suggested rewrite, which writes the matmul as `bmm` on (heads, tokens, width).
    """
    left, right = node.tensors[:2]
    if _rank(right) == 1:
        vector = format_shape(right.shape)
        return (
            f"matmul {format_shape(left.shape)} by the vector {vector} becomes a sum; use a linear"
        )
    if _rank(right) < 3:
        return ""
    shapes = f"{format_shape(left.shape)} by {format_shape(right.shape)}"
    return f"matmul {shapes} copies both operands; bmm of rank 3 does not"


@node_rule("WP305", "An argument has an unsupported value")
def argument(graph: Graph, node: Node, value: tuple[str, Set[str]]) -> str:
    """The target supports this operator for some values of an argument only.

    What to do: write the operation with other operators: a cube as two multiplications, a strided slice
    as a reshape and a slice.
    """
    name, supported = value
    attribute = node.attributes.get(name)
    if name == "exponent" and len(node.tensors) > 1:
        attribute = "a tensor"
    if attribute is None or str(attribute) in supported:
        return ""
    listed = " and ".join(sorted(supported)) or "none"
    return f"{node.op} with {name}={attribute}; supported: {listed}"


@node_rule("WP306", "A number in arithmetic has an unsupported form")
def scalar(graph: Graph, node: Node, _: Any) -> str:
    """torch stores the 2 of `x * 2` as an integer tensor, and converts it to floating point each time
    the program runs. The multiplication is delegated, the conversion of this one number is not.
    `mul.Scalar`, which the decomposition of fused attention contains, is not supported: its number is
    not a tensor.

    What to do: write `x * 2.0`. Do not decompose attention before it is rewritten.
    """
    if node.original_op.endswith(".Scalar") and node.op != "rsub":
        return f"{node.original_op}: the number is not a tensor; the target supports tensors only"
    integers = [v for k, v in node.attributes.items() if k in ("other", "self") and type(v) is int]
    floats = node.output.dtype.startswith(("float", "bfloat"))
    return (
        f"{node.op} with the integer {integers[0]}; write it as a floating-point number"
        if integers and floats
        else ""
    )


@node_rule("WP307", "The target does not convert dtypes")
def conversion(graph: Graph, node: Node, _: Any) -> str:
    """The target does not convert dtypes inside a program. A conversion to the dtype that the tensor
    already has is ignored: the compiler removes it.

    What to do: convert weights before the export, and inputs on the host.
    """
    source, result = node.tensors[0].dtype, node.output.dtype
    if source == result:
        return ""
    return (
        f"conversion from {source} to {result}; the target converts no dtypes: convert on the host"
    )


@node_rule("WP308", "A tensor is concatenated with itself")
def duplicate_inputs(graph: Graph, node: Node, _: Any) -> str:
    """The target concatenates two tensors or more. The compiler counts a tensor that occurs twice as
    one.

    What to do: repeat the tensor on the host, or copy one of the two with an operation such as a
    multiplication by 1.0.
    """
    distinct = len({value.name for value in node.tensors})
    return f"{node.op} of {distinct} distinct tensor; at least 2 are needed" if distinct < 2 else ""


@node_rule("WP309", "A pad has a negative width")
def negative_pad(graph: Graph, node: Node, _: Any) -> str:
    """A pad with a negative width removes elements. The target does not support this.

    What to do: replace the pad by a slice.
    """
    pads = node.attributes.get("pad")
    cut = isinstance(pads, list) and any(isinstance(width, int) and width < 0 for width in pads)
    return f"pad by {pads}; widths must be 0 or more: use a slice" if cut else ""


@node_rule("WP310", "A write to a part of a tensor copies the tensor")
def written_part(graph: Graph, node: Node, views: Set[str]) -> str:
    """The node writes in place to a view: `rows = x[:, :2]`, then `rows += y`. In a compiler's program,
    no two tensors share memory, so torch writes a copy of `x` with the new rows (`slice_scatter`,
    `select_scatter`), which the target does not support.

    What to do: write the operation without a change in place: `torch.cat([x[:, :2] + y, x[:, 2:]], 1)`.
    If the view is all of the tensor, leave out the slice, or write `rows = rows + y`.
    """
    written_views = [view for view in node.attributes.get(WRITTEN, ()) if view in views]
    return (
        f"{node.op} writes in place through {written_views[0]}: torch adds a copy"
        if written_views
        else ""
    )


@node_rule("WP311", "Too many tensors are concatenated")
def concatenated(graph: Graph, node: Node, most: int) -> str:
    """The target concatenates a few tensors only.

    What to do: concatenate the first tensors, and then the result with the others.
    """
    count = len(node.tensors)
    return f"{node.op} of {count} tensors; at most {most} are supported" if count > most else ""
