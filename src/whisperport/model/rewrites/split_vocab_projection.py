"""Split the vocabulary projection into n pieces that a small accelerator supports; n is 4 by default.

    before   x(1,P,d) ── linear(w(V,d)) ───────────────────────────► logits(1,P,V)
    after    x(1,P,d) ─┬─ linear(w[0 : V/n]) ──────── (1,P,V/n) ──┐
                       ├─ …                                       ├─ cat ─► logits(1,P,V)
                       └─ linear(w[V - V/n : V]) ──── (1,P,V/n) ──┘

The last piece also gets the remainder of the division.
Why: a matmul as wide as the vocabulary is too large for a small accelerator. Published graphs have four
pieces, of 12966, 12966, 12966 and 12967 columns.
Exact: every logit is the same dot product. The weights of the pieces share the memory of the original.
"""

from itertools import pairwise

from torch.fx import GraphModule, Node

from whisperport.model.rewrites.graph_edits import (
    arguments,
    aten,
    calls,
    is_vocabulary,
    replace,
    store,
    stored,
)
from whisperport.model.rewrites.rewrite import rewrite
from whisperport.program.spec import Rejection


@rewrite("split-vocab-projection", exact=True, number=4)
def split_vocab_projection(module: GraphModule, number: int) -> tuple[list[str], list[Rejection]]:
    """Split each vocabulary projection that has a stored weight and is not split already."""
    changed: list[str] = []
    rejected: list[Rejection] = []
    for node in calls(module, aten.linear.default):
        if not is_vocabulary(node):
            continue
        if reason := _obstacle(module, node, number):
            rejected.append(Rejection(node.name, reason))
            continue
        _replace(module, node, number)
        changed.append(node.name)
    return changed, rejected


def _obstacle(module: GraphModule, node: Node, number: int) -> str:
    args = arguments(node)
    weight, bias = stored(module, args["weight"]), stored(module, args["bias"])
    if weight is None or (args["bias"] is not None and bias is None):
        return "the weight is computed, not stored; only a stored weight is supported"
    if weight.shape[0] < number:
        return f"{weight.shape[0]} columns cannot be split into {number} pieces"
    if number == 1:
        return "the requested number of pieces is 1, so nothing changes"
    if _is_piece(node):
        return "the linear is a piece of a projection that is already split"
    return ""


def _is_piece(node: Node) -> bool:
    """Whether another vocabulary projection has the same input."""
    users = arguments(node)["input"].users
    return sum(user.target is aten.linear.default and is_vocabulary(user) for user in users) > 1


def _replace(module: GraphModule, node: Node, number: int) -> None:
    args = arguments(node)
    weight, bias = stored(module, args["weight"]), stored(module, args["bias"])
    assert weight is not None
    size = weight.shape[0] // number
    bounds = [*(i * size for i in range(number)), weight.shape[0]]
    call = module.graph.call_function
    with module.graph.inserting_before(node):
        pieces = []
        for start, end in pairwise(bounds):
            parts = [store(module, f"{node.name}_weight", weight[start:end])]
            parts += [] if bias is None else [store(module, f"{node.name}_bias", bias[start:end])]
            pieces.append(call(aten.linear.default, (args["input"], *parts)))
        result = call(aten.cat.default, (pieces, -1))
    replace(node, result)
