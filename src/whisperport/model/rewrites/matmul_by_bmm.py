"""Replace a matmul over batch and heads by a rank-3 `bmm`.

    before   a(1,H,M,K), b(1,H,K,N) ── matmul ────────────────────────► y(1,H,M,N)
    after    a ─ reshape ─ (H,M,K) ─┐
             b ─ reshape ─ (H,K,N) ─┴─ bmm ─ (H,M,N) ─ reshape ───────► y(1,H,M,N)

Why: torch decomposes a `matmul` of rank 4 into two `expand_copy` and a `bmm`. XNNPACK supports only the
`bmm`: ExecuTorch 1.5.1 leaves 16 `expand_copy` of Whisper tiny's encoder undelegated.
Exact: the multiplications and sums do not change.
"""

# A file of its own, though short: each rewrite has one.

from torch.fx import GraphModule, Node

from whisperport.model.rewrites.graph_edits import aten, calls, replace, shape
from whisperport.model.rewrites.rewrite import rewrite
from whisperport.program.spec import Rejection


@rewrite("matmul-by-bmm", exact=True)
def matmul_by_bmm(module: GraphModule) -> tuple[list[str], list[Rejection]]:
    """Replace each matmul of two tensors of rank 4 or more, unless their outer axes broadcast."""
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
            reason = f"the operands have the outer sizes {outer} and {right}; only equal ones are supported"
            rejected.append(Rejection(node.name, reason))
            continue
        _replace(module, node, a, b)
        changed.append(node.name)
    return changed, rejected


def _replace(module: GraphModule, node: Node, a: Node, b: Node) -> None:
    call = module.graph.call_function
    with module.graph.inserting_before(node):
        sides = [call(aten.reshape.default, (side, [-1, *shape(side)[-2:]])) for side in (a, b)]
        batched = call(aten.bmm.default, tuple(sides))
        result = call(aten.reshape.default, (batched, shape(node)))
    replace(node, result)
