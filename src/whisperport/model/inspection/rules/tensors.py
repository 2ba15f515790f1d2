"""WP2xx: ranks, dtypes, sizes and scales of tensors."""

from collections.abc import Iterator, Set

from whisperport.model.inspection.graph import Graph, Node, Value
from whisperport.model.inspection.rules.rule import Finding, format_shape, node_rule, rule
from whisperport.program.spec import Limit

MATMULS = frozenset({"linear", "addmm", "matmul", "mm", "bmm", "baddbmm"})
LOWERED = "the target runs it, but `lower` and `fix` need a number for each symbol: `--size`"
STATIC = "every axis must be a fixed number; export again with static shapes"


@node_rule("WP201", "The rank of a tensor is too high")
def rank(graph: Graph, node: Node, limit: int) -> str:
    """Accelerators keep the sizes of a tensor in a fixed number of registers: four on most neural
    processors. Their compilers reject a tensor of higher rank, even if all but four axes have length 1.

    What to do: fold axes before the node and unfold them after it. `whisperport lower` does this with
    the rewrite `fold-axes`, except for inputs and outputs: fold those on the host. With a batch of 1,
    attention needs three axes: (heads, tokens, head width).
    """
    ranks = [len(value.shape) for value in (*node.tensors, *node.outputs) if value.shape]
    return (
        f"rank {max(ranks)} is above the limit of {limit}; fold axes"
        if ranks and max(ranks) > limit
        else ""
    )


@rule("WP202", "An input or output has an unsupported dtype")
def boundary_dtype(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """Each input and output must have a dtype that the target's runtime can pass. Token ids are the
    usual case: they are int64 in torch, and neural processors have no int64.

    What to do: look tokens up on the host and pass their embeddings. Convert float64 to float32 before
    the program runs.
    """
    for what, values in (("input", graph.inputs), ("output", graph.outputs)):
        for value in values:
            if value.dtype and value.dtype not in limit.value:
                supported = ", ".join(sorted(limit.value))
                yield Finding(value.name, f"{what} of dtype {value.dtype}; supported: {supported}")


@node_rule("WP203", "A node computes in an unsupported dtype")
def node_dtype(graph: Graph, node: Node, dtypes: Set[str]) -> str:
    """The accelerator computes in few dtypes, and all operands of a node must have the same one.
    Arithmetic on integers, booleans, float64 or mixed dtypes runs on the CPU.

    What to do: compute positions, masks and indices on the host, or fold them into constants. Convert
    all weights to one dtype before the export.
    """
    if node.op == "to":
        return ""  # WP307
    values = [value.dtype for value in (*node.tensors, *node.outputs) if value.dtype]
    odd = next((dtype for dtype in values if dtype not in dtypes), "")
    if odd:
        return f"{node.op} on {odd}; the target computes in {', '.join(sorted(dtypes))}"
    read = sorted({value.dtype for value in node.tensors if value.dtype})
    mixed = " and ".join(read)
    return f"{node.op} mixes {mixed}; all operands must have one dtype" if len(read) > 1 else ""


@rule("WP204", "A shape is dynamic")
def dynamic(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """A compiler for an accelerator plans memory and tiling in advance, so every axis needs a fixed
    length.

    What to do: give `check`, `fix` and `lower` a number for each symbol of a `.pt2` file, such as
    `--size s27=128`. Or export again with static shapes: from torch without `dynamic_shapes`, to ONNX
    without `dynamic_axes`. One program for each length that is needed.
    """
    advice = LOWERED if limit.kind == "warning" else STATIC
    for value in graph.inputs:
        if _is_dynamic(value):
            yield Finding(value.name, f"input of shape {format_shape(value.shape)}; {advice}")
    if limit.kind == "warning":
        return
    beyond: set[str] = (
        set()
    )  # outputs of custom operators: their shapes exist, but files do not state them
    for node in graph.nodes:
        if node.custom or any(value.name in beyond for value in node.tensors):
            beyond.update(value.name for value in node.outputs if _is_dynamic(value))
            continue
        if any(_is_dynamic(value) for value in (*node.tensors, *node.outputs)):
            worst = next(v for v in (*node.outputs, *node.tensors) if _is_dynamic(v))
            yield Finding(node.name, f"shape {format_shape(worst.shape)}; {STATIC}", node)


def _is_dynamic(value: Value) -> bool:
    return value.shape is None or any(isinstance(axis, str) for axis in value.shape)


@node_rule("WP205", "The target does not support a convolution of this rank")
def conv_rank(graph: Graph, node: Node, ranks: Set[int]) -> str:
    """Whisper's encoder begins with two convolutions along time, of rank 3: (batch, channels, frames).
    Compilers made for images support convolutions of rank 4 only.

    What to do: apply the suggested rewrite. It adds an axis of length 1, which does not change the
    result.
    """
    if node.op != "conv":
        return ""
    rank = len(node.tensors[0].shape or ())
    if rank in ranks:
        return ""
    return f"convolution of rank {rank}; supported: rank {' and '.join(map(str, sorted(ranks)))}"


@node_rule("WP206", "A tensor is too large")
def tensor_bytes(graph: Graph, node: Node, limit: int) -> str:
    """A tensor must fit into the accelerator's memory, or into the largest buffer its driver allocates.

    What to do: split the matmul that computes the tensor, shorten the window, or keep this part on the
    host.
    """
    largest = max((value.n_bytes or 0 for value in (*node.tensors, *node.outputs)), default=0)
    return f"a tensor of {largest:,} bytes; the limit is {limit:,} bytes" if largest > limit else ""


@node_rule("WP209", "A tensor has no elements")
def empty(graph: Graph, node: Node, _: None) -> str:
    """The target does not support a tensor with an axis of length 0. A cache that starts empty has one.

    What to do: start with a cache of full length and mask the unused positions.
    """
    read = (
        *node.tensors,
        *node.outputs[:1],
    )  # the other outputs of a batch norm are empty and unused
    sizes = [value for value in read if value.size == 0]
    if not sizes:
        return ""
    shape = format_shape(sizes[0].shape)
    return f"{node.op} on a tensor of shape {shape}; every axis needs a length of at least 1"


@node_rule("WP207", "A matmul has too many output columns")
def matmul_width(graph: Graph, node: Node, limit: int) -> str:
    """Whisper's last matmul computes one score for each of about 51,865 tokens. A small neural
    processor cannot allocate a matmul of this width. The vendor's compiler fails late, and its message
    does not name the cause.

    What to do: apply the suggested rewrite, which splits the weight into pieces and concatenates the
    results.
    """
    shape = node.output.shape
    if node.op not in MATMULS or not shape or not isinstance(shape[-1], int):
        return ""
    return (
        f"a matmul with {shape[-1]:,} output columns; the limit is {limit:,}"
        if shape[-1] > limit
        else ""
    )


@rule("WP208", "The batch size is not supported")
def batch(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """The target runs a fixed batch size, in most cases 1.

    What to do: export again with that batch size as the first axis of every input.
    """
    for value in graph.inputs:
        if value.shape and isinstance(value.shape[0], int) and value.shape[0] != limit.value:
            reason = (
                f"input of shape {format_shape(value.shape)}; its first axis must be {limit.value}"
            )
            yield Finding(value.name, reason)


@node_rule("WP210", "An axis is too long")
def axis_length(graph: Graph, node: Node, limit: int) -> str:
    """The accelerator counts along each axis of an activation with a register of fixed width, for
    example of 16 bits. Weights are not counted: the compiler splits them.

    What to do: split the tensor along this axis, and join the results; for the logits of the
    vocabulary, `split-vocab-projection` does this.
    """
    for value in (*node.tensors, *node.outputs):
        axes = [axis for axis in value.shape or () if isinstance(axis, int)]
        if not value.constant and max(axes, default=0) > limit:
            return f"an axis of length {max(axes):,}; the limit is {limit:,}"
    return ""


@node_rule("WP211", "A quantized tensor has one scale per channel")
def per_channel(graph: Graph, node: Node, operators: Set[str]) -> str:
    """One scale for each output channel is more accurate than one for the complete weight, but the
    accelerator reads it for some operators only.

    What to do: quantize the tensors of this operator with one scale each, or do not quantize the
    operator.
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
    """The accelerator computes in few dtypes. 64-bit integers and booleans may be stored in the file,
    for example as a shape or an axis, but no node may compute with them.

    What to do: compute positions, indices and masks on the host, and pass the mask as floating-point
    numbers that are added to the scores.
    """
    for value in (*node.tensors, *node.outputs):
        if value.dtype and not value.constant and value.dtype not in dtypes:
            return f"{node.op} on {value.dtype}; the target computes in {', '.join(sorted(dtypes))}"
    return ""


@node_rule("WP213", "A tensor of 16-bit integers is not symmetric with one scale")
def symmetric_16_bit(graph: Graph, node: Node, _: None) -> str:
    """The accelerator reads 16-bit activations only if the zero point is 0, and if the complete tensor
    has one scale. Quantizers for 16-bit activations write this form by default.

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
    """The accelerator does not support a matmul with activations of 16 bits and weights of 8 bits
    (w8a16).

    What to do: keep the program in floating point, or quantize activations and weights to 8 bits (w8a8)
    and check the accuracy. The activations of Whisper's encoder have outliers, for which 8 bits are not
    enough.
    """
    wide = any(value.dtype == "int16" and not value.constant for value in node.tensors)
    narrow = any(value.dtype == "int8" and value.constant for value in node.tensors)
    return f"{node.op} of int16 activations with int8 weights" if wide and narrow else ""
