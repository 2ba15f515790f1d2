"""Compute the logits of the last position only.

    before   x(B,P,d) ──────────────────────────── linear(w(V,d)) ──► logits(B,P,V)
    after    x(B,P,d) ── slice(P-1) ── (B,1,d) ─── linear(w(V,d)) ──► logits(B,1,V)

Why: greedy decoding reads one row of P, and the vocabulary is the widest product of the decoder: with 128
rows of Whisper tiny, 5.1 of its 12 GFLOP. The shape of the output changes, so no target asks for it: it is
for programs whose caller fills all P rows.
Exact: the row is the same product.
"""

from torch.fx import GraphModule, Node

from whisperport.rewrites.base import rewrite
from whisperport.rewrites.graph import arguments, aten, is_vocabulary, shape
from whisperport.spec import Refusal

PRODUCTS = (aten.matmul.default, aten.mm.default, aten.addmm.default)


@rewrite("last-position-logits", exact=True, keeps_shapes=False)
def last_position_logits(module: GraphModule) -> tuple[list[str], list[Refusal]]:
    """Cut the rows before the vocabulary projection that is returned; decline what is no linear."""
    changed: list[str] = []
    refused: list[Refusal] = []
    for node in module.graph.output_node().all_input_nodes:
        if node.target in PRODUCTS:
            reason = "it is no linear; `matmul-by-linear` makes one of a stored, transposed matrix"
            refused.append(Refusal(node.name, reason))
        if node.target is not aten.linear.default or not is_vocabulary(node):
            continue
        if reason := _obstacle(node):
            refused.append(Refusal(node.name, reason))
            continue
        _cut(module, node)
        changed.append(node.name)
    return changed, refused


def _obstacle(node: Node) -> str:
    rows = shape(node)
    if len(rows) != 3:
        return f"its result has rank {len(rows)}; only (batch, rows, vocabulary) is handled"
    if rows[1] == 1:
        return "it has one row already"
    if len(node.users) != 1:
        return "its other rows are used as well"
    return ""


def _cut(module: GraphModule, node: Node) -> None:
    x, rows = arguments(node)["input"], shape(node)[1]
    with module.graph.inserting_before(node):
        last = module.graph.call_function(aten.slice.Tensor, (x, 1, rows - 1, rows))
    node.update_arg(0, last)
