"""Count the cost of a program: floating-point operations and bytes moved, per node and in total.

A multiplication and an addition count as two operations. exp, erf, tanh and a square root count as one
each, so that the counts are the same on every machine. The counts do not predict how long a node takes.

    linear, matmul   2·M·N·K; with a bias, M·N more
    convolution      2·outputs·(C / groups · kernel); with a bias, one more per output
    attention        2·H·P·T·(D + Dv) for its two matmuls, and 6 per entry of its (H, P, T) scores for scale
                     and softmax; 7 with a mask. A causal mask saves nothing: every score is computed
    softmax          5 per element: maximum, subtraction, exp, sum, division
    layer norm       8 per element: mean, subtraction, square, mean, multiplication, weight, bias, and 1 for
                     the square root and the reciprocal of each row
    batch norm       2 per element; group norm, as layer norm, 8
    LSTM, GRU        2 per weight for each frame
    pooling          1 per value that is read
    GELU             5 per element: scale, erf, + 1, two multiplications; 9 in its tanh form
    elementwise      1 per element of the output; for a sum or mean, 1 per element of the input
    data movement    0

Bytes are those of the inputs and outputs, each counted once, as if nothing stayed in a cache. Weights
(constants) and activations are counted separately. A reshape moves no bytes. A lookup or a slice reads as
many bytes as it writes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from whisperport.model.inspection.graph import Graph, Node, Value

# Operators that move no bytes.
ZERO_COPY = frozenset({"alias", "detach", "reshape", "squeeze", "unsqueeze", "shape"})
# Operators that read only the part of their first input that they return.
PARTIAL_READS = frozenset(
    {"embedding", "gather", "index", "index_select", "select", "slice", "split"}
)

PER_OUTPUT_ELEMENT = {
    **dict.fromkeys(["softmax", "log_softmax"], 5),
    "layer_norm": 8,
    **dict.fromkeys(["group_norm", "instance_norm"], 8),
    **dict.fromkeys(["batch_norm", "_native_batch_norm_legit_no_training"], 2),
    **dict.fromkeys(["upsample_bilinear2d", "upsample_linear1d"], 7),  # four values by two weights
    "MVN": 6,  # a layer norm without weight and bias
    "squared_difference": 2,
    "rsqrt": 2,
    "sigmoid": 4,
    "silu": 5,
    **dict.fromkeys(
        [
            "add",
            "sub",
            "rsub",
            "mul",
            "div",
            "maximum",
            "minimum",
            "pow",
            "square",
            "abs",
            "neg",
            "relu",
            "clamp",
        ],
        1,
    ),
    **dict.fromkeys(
        ["exp", "log", "erf", "tanh", "sqrt", "reciprocal", "sin", "cos", "floor", "ceil", "where"],
        1,
    ),
    **dict.fromkeys(
        ["eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "cumsum"],
        1,
    ),
    **dict.fromkeys(["hardtanh", "leaky_relu", "masked_fill", "triu", "tril"], 1),
}
PER_INPUT_ELEMENT = dict.fromkeys(["mean", "sum", "amax", "amin", "any", "argmax", "max"], 1)
PER_INPUT_ELEMENT |= {"all": 1, "prod": 1}
PER_INPUT_ELEMENT |= {"var": 4, "std": 5}
MOVEMENT = (
    ZERO_COPY | PARTIAL_READS | {"transpose", "cat", "stack", "clone", "to", "expand", "repeat"}
)
MOVEMENT |= {
    "constant_pad_nd",
    "PADV2",
    "full",
    "full_like",
    "zeros",
    "zeros_like",
    "ones",
    "ones_like",
}
MOVEMENT |= {"arange", "copy", "copy_", "unbind", "chunk", "roll", "flip", "scalar_tensor"}
MOVEMENT |= {"slice_scatter", "pixel_shuffle", "upsample_nearest1d", "upsample_nearest2d"}
MATMULS = frozenset({"linear", "addmm", "matmul", "mm", "bmm", "baddbmm"})


@dataclass(frozen=True, slots=True)
class NodeCost:
    """The cost of one node; all counts are 0 if a shape is not static."""

    node: Node
    flops: int  # 0 if the operator is not counted
    weight_bytes: int  # of the constants that the node reads
    activation_bytes: int  # of its other inputs and of its outputs
    counted: bool = True  # False: a shape is not static, or the operator is not counted

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.weight_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a complete program."""

    nodes: tuple[NodeCost, ...]  # in the program's order
    stored_bytes: int  # of all constants; each is counted once, even if several nodes read it

    @property
    def flops(self) -> int:
        """Floating-point operations of all nodes."""
        return sum(node.flops for node in self.nodes)

    @property
    def bytes(self) -> int:
        """Bytes read and written by all nodes."""
        return sum(node.bytes for node in self.nodes)

    @property
    def uncounted(self) -> int:
        """Number of nodes that the counts do not include."""
        return sum(not node.counted for node in self.nodes)


def cost_of(graph: Graph) -> Cost:
    """Count the cost of every node of `graph`."""
    constants = {
        value.name: value.n_bytes or 0
        for node in graph.nodes
        for value in node.tensors
        if value.constant
    }
    return Cost(tuple(_node_cost(node) for node in graph.nodes), sum(constants.values()))


def contracted(node: Node) -> int:
    """Return K of a matmul: the length of the axis over which it sums."""
    left = node.tensors[0].shape or (1,)
    return int(left[-2 if node.attributes.get("transposed_left") else -1])


def _node_cost(node: Node) -> NodeCost:
    values = [*node.tensors, *node.outputs]
    if any(value.n_bytes is None for value in values):
        return NodeCost(node, 0, 0, 0, counted=False)
    weights, activations = _bytes(node)
    flops = _flops(node)
    return NodeCost(node, flops or 0, weights, activations, counted=flops is not None)


def _bytes(node: Node) -> tuple[int, int]:
    """Return the bytes of weights read, and of activations read and written."""
    if node.op in ZERO_COPY:
        return 0, 0
    written = sum(_n_bytes(value) for value in node.outputs)
    if node.op in PARTIAL_READS:
        indices = sum(_n_bytes(value) for value in node.tensors[1:])
        source_is_constant = bool(node.tensors) and node.tensors[0].constant
        return (written, written + indices) if source_is_constant else (0, 2 * written + indices)
    read = [value for value in node.tensors if not value.constant]
    constants = [value for value in node.tensors if value.constant]
    return sum(map(_n_bytes, constants)), written + sum(map(_n_bytes, read))


def _flops(node: Node) -> int | None:
    """Return the floating-point operations of a node; None if the operator is not counted."""
    if node.op in MOVEMENT:
        return 0
    if node.op in PER_OUTPUT_ELEMENT:
        return PER_OUTPUT_ELEMENT[node.op] * _size(node.output)
    if node.op in PER_INPUT_ELEMENT:
        return PER_INPUT_ELEMENT[node.op] * _size(node.tensors[0])
    if node.op in MATMULS:
        return _matmul(node)
    counted = _FLOPS_OF.get(node.op)
    return counted(node) if counted else None


def _matmul(node: Node) -> int:
    """Count (…, M, K) times (…, K, N), or times (N, K) for `linear`; a third input is a bias."""
    return _size(node.output) * (2 * contracted(node) + (len(node.tensors) > 2))


def _conv(node: Node) -> int:
    """Count a convolution with weight (O, C / groups, *kernel).

    TFLite's weight is (O, *kernel, C), which has the same number of elements.
    """
    kernel = prod(int(axis) for axis in (node.tensors[1].shape or ())[1:])
    positions = _size(node.tensors[0]) if node.attributes.get("transposed") else _size(node.output)
    return 2 * positions * kernel + _size(node.output) * (len(node.tensors) > 2)


def _attention(node: Node) -> int:
    """Count attention of q (…, P, D), k (…, T, D) and v (…, T, Dv)."""
    q, k, v = (value.shape or (1, 1) for value in node.tensors[:3])
    scores = _size(node.tensors[0]) // max(1, int(q[-1])) * int(k[-2])
    masked = len(node.tensors) > 3 or bool(node.attributes.get("is_causal"))
    return scores * (2 * (int(q[-1]) + int(v[-1])) + 6 + masked)


def _gelu(node: Node) -> int:
    return (9 if node.attributes.get("approximate") == "tanh" else 5) * _size(node.output)


def _recurrent(node: Node) -> int:
    """Count an LSTM or a GRU: each frame of the input is multiplied by all weights."""
    frames = prod(int(axis) for axis in (node.tensors[0].shape or ())[:-1])
    return 2 * frames * sum(_size(value) for value in node.tensors if value.constant)


def _pooling(node: Node) -> int:
    kernel = node.attributes.get("kernel_size", ())
    return _size(node.output) * prod(kernel if isinstance(kernel, list | tuple) else (kernel,))


_FLOPS_OF: dict[str, Callable[[Node], int]] = {
    "conv": _conv,
    **dict.fromkeys(["gru", "GRU", "lstm", "LSTM"], _recurrent),
    **dict.fromkeys(["avg_pool1d", "avg_pool2d", "max_pool1d", "max_pool2d"], _pooling),
    "gelu": _gelu,
    "scaled_dot_product_attention": _attention,
}


def _size(value: Value) -> int:
    return value.size or 0


def _n_bytes(value: Value) -> int:
    return value.n_bytes or 0
