"""WP2xx: ranks, dtypes and sizes of tensors."""

from collections.abc import Iterator, Set

from whisperport.inspection.graph import Graph, Node, Value
from whisperport.inspection.rules.base import Finding, node_rule, rule, shown
from whisperport.spec import Limit

PRODUCTS = frozenset({"linear", "addmm", "matmul", "mm", "bmm", "baddbmm"})


@node_rule("WP201", "A tensor has too many axes")
def rank(graph: Graph, node: Node, limit: int) -> str:
    """Accelerators keep the sizes of a tensor in a fixed number of registers: four on most neural
    processors. A compiler rejects a tensor of more axes, even where all but four have length 1.

    What to do: fold axes before the node and unfold them afterwards; `whisperport lower` does that with the
    rewrite `fold-axes`, for the operators that it knows. Attention needs no more than three, (heads, rows,
    width), where the batch is 1. Inputs and outputs keep their axes: fold those on the host.
    """
    ranks = [len(value.shape) for value in (*node.tensors, *node.outputs) if value.shape]
    return f"rank {max(ranks)} is above {limit}" if ranks and max(ranks) > limit else ""


@rule("WP202", "An input or output has a dtype the target does not pass")
def boundary_dtype(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """What crosses the program's boundary must be of a dtype that the target's runtime can hand over. Token
    ids are the usual case: they are 64-bit integers in torch, and neural processors have none.

    What to do: look tokens up on the host and pass their embeddings; convert float64 before the program.
    """
    for what, values in (("input", graph.inputs), ("output", graph.outputs)):
        for value in values:
            if value.dtype and value.dtype not in limit.value:
                supported = ", ".join(sorted(limit.value))
                yield Finding(value.name, f"{what} of {value.dtype}; supported: {supported}")


@node_rule("WP203", "A node computes in a dtype the target does not have")
def node_dtype(graph: Graph, node: Node, dtypes: Set[str]) -> str:
    """The accelerator computes in few dtypes, and with both operands of the same. Arithmetic on
    integers, on booleans, in float64, or on two dtypes at once stays on the CPU.

    What to do: compute positions, masks and indices on the host or fold them into constants; convert
    weights to one dtype before the export.
    """
    if node.op == "to":
        return ""  # WP307
    values = [value.dtype for value in (*node.tensors, *node.outputs) if value.dtype]
    odd = next((dtype for dtype in values if dtype not in dtypes), "")
    if odd:
        return f"{node.op} on {odd}; it computes in {', '.join(sorted(dtypes))}"
    read = sorted({value.dtype for value in node.tensors if value.dtype})
    return f"{node.op} mixes {' and '.join(read)}" if len(read) > 1 else ""


@rule("WP204", "A shape is not known before the program runs")
def dynamic(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """Accelerators plan memory and tiling when a program is compiled, so every axis must be a number. One
    dynamic input makes every tensor after it dynamic.

    What to do: export again with static shapes: without `dynamic_shapes` from torch, without `dynamic_axes`
    to ONNX, one program for each length that is needed. Whisper's windows, prompts and caches are all of
    fixed length.
    """
    for value in graph.inputs:
        if _is_dynamic(value):
            yield Finding(value.name, f"input of shape {shown(value.shape)}")
    beyond: set[str] = set()  # what a custom operator hides: it has a shape, and no file states it
    for node in graph.nodes:
        if node.custom or any(value.name in beyond for value in node.tensors):
            beyond.update(value.name for value in node.outputs if _is_dynamic(value))
            continue
        if any(_is_dynamic(value) for value in (*node.tensors, *node.outputs)):
            worst = next(v for v in (*node.outputs, *node.tensors) if _is_dynamic(v))
            yield Finding(node.name, f"shape {shown(worst.shape)}", node)


def _is_dynamic(value: Value) -> bool:
    return value.shape is None or any(isinstance(axis, str) for axis in value.shape)


@node_rule("WP205", "A convolution has a rank the target does not have")
def conv_rank(graph: Graph, node: Node, ranks: Set[int]) -> str:
    """Whisper begins with two convolutions along time, of rank 3: (batch, channels, frames). Compilers
    made for images have convolutions of rank 4 only.

    What to do: apply the rewrite. It adds an axis of length 1, which changes no sum.
    """
    if node.op != "conv":
        return ""
    met = len(node.tensors[0].shape or ())
    if met in ranks:
        return ""
    return f"convolution of rank {met}; it has rank {' and '.join(map(str, sorted(ranks)))}"


@node_rule("WP206", "A tensor is too large")
def tensor_bytes(graph: Graph, node: Node, limit: int) -> str:
    """A tensor must fit into the accelerator's memory, or into the largest buffer its driver gives out.

    What to do: split the product that makes it, shorten the window, or keep this part on the host.
    """
    largest = max((value.n_bytes or 0 for value in (*node.tensors, *node.outputs)), default=0)
    return f"a tensor of {largest:,} bytes; the limit is {limit:,}" if largest > limit else ""


@node_rule("WP209", "A tensor has no elements")
def empty(graph: Graph, node: Node, _: None) -> str:
    """The target supports no tensor with an axis of length 0. Caches that start empty have one.

    What to do: start with a cache of full length and a mask.
    """
    read = (*node.tensors, *node.outputs[:1])  # a batch norm's second and third have none, unread
    sizes = [value for value in read if value.size == 0]
    return f"{node.op} on a tensor of shape {shown(sizes[0].shape)}" if sizes else ""


@node_rule("WP207", "A product has too many columns")
def product_width(graph: Graph, node: Node, limit: int) -> str:
    """Whisper's last product gives one score for each of about 51,865 tokens. A small neural processor
    cannot place so wide a product; the vendor's compiler fails late, and says little.

    What to do: apply the rewrite, which cuts the weight into pieces and joins the results.
    """
    shape = node.output.shape
    if node.op not in PRODUCTS or not shape or not isinstance(shape[-1], int):
        return ""
    return (
        f"a product of {shape[-1]:,} columns; the limit is {limit:,}" if shape[-1] > limit else ""
    )


@rule("WP208", "The batch is not what the target runs")
def batch(graph: Graph, limit: Limit) -> Iterator[Finding]:
    """The target runs one recording at a time, or a fixed number of them.

    What to do: export again with that number as the first axis of every input.
    """
    for value in graph.inputs:
        if value.shape and isinstance(value.shape[0], int) and value.shape[0] != limit.value:
            reason = f"input of shape {shown(value.shape)}; its first axis must be {limit.value}"
            yield Finding(value.name, reason)
