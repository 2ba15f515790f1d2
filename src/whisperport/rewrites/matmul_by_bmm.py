"""Write a product over batch and heads as a rank-3 `bmm`.

    before   a(1,H,M,K), b(1,H,K,N) ── matmul ────────────────────────► y(1,H,M,N)
    after    a ─ reshape ─ (H,M,K) ─┐
             b ─ reshape ─ (H,K,N) ─┴─ bmm ─ (H,M,N) ─ reshape ───────► y(1,H,M,N)

Why: `matmul` of rank 4 decomposes into two `expand_copy` and a `bmm`; XNNPACK takes the last and not the
others. Measured on ExecuTorch 1.5.1: 16 `expand_copy` of Whisper tiny's encoder stayed outside.
Exact: the same products and sums.
"""

from torch.fx import GraphModule, Node

from whisperport.rewrites.base import rewrite
from whisperport.rewrites.graph import aten, calls, replace, shape
from whisperport.spec import Rejection


@rewrite("matmul-by-bmm", exact=True)
def matmul_by_bmm(module: GraphModule) -> tuple[list[str], list[Rejection]]:
    """Replace each product of two tensors of rank 4 or more; decline those that broadcast."""
    changed: list[str] = []
    rejected: list[Rejection] = []
    for node in calls(module, aten.matmul.default):
        a, b = node.args
        assert isinstance(a, Node)
        assert isinstance(b, Node)
        outer, right = shape(a)[:-2], shape(b)[:-2]
        if max(len(outer), len(right)) < 2:
            continue
        if outer != right:
            reason = (
                f"its sides have the outer sizes {outer} and {right}; only equal ones are handled"
            )
            rejected.append(Rejection(node.name, reason))
            continue
        _replace(module, node, a, b)
        changed.append(node.name)
    return changed, rejected


def _replace(module: GraphModule, node: Node, a: Node, b: Node) -> None:
    call = module.graph.call_function
    with module.graph.inserting_before(node):
        sides = [call(aten.reshape.default, (side, [-1, *shape(side)[-2:]])) for side in (a, b)]
        product = call(aten.bmm.default, tuple(sides))
        result = call(aten.reshape.default, (product, shape(node)))
    replace(node, result)
