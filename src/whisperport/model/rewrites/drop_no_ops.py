"""Remove nodes without effect at inference: casts to the same dtype, dropout, multiplications by 1, checks.

    before   w(O,I) ── to(float32) ──┐
             x(…,I) ── dropout(p) ───┴─ linear ─ mul(1.0) ─ to(float32) ─► y(…,O)
    after    w(O,I) ─────────────────┐
             x(…,I) ─────────────────┴─ linear ──────────────────────────► y(…,O)

Why: openai-whisper casts every weight to the dtype of its input, so no weight is recognized as a
constant. transformers has dropout and multiplications by 1.0 between nodes that other rewrites search
for. A check of metadata keeps unused nodes in the graph.
Exact: each of these nodes returns its input, bit for bit.
"""

# A file of its own, though short: each rewrite has one.

import torch
from torch.fx import GraphModule, Node

from whisperport.model.rewrites.graph_edits import arguments, aten, calls, replace, shape, value
from whisperport.model.rewrites.rewrite import rewrite
from whisperport.program.spec import Rejection

CASTS = (aten.to.dtype, aten.to.dtype_layout)
DROPOUTS = (aten.dropout.default, aten.dropout_.default, aten.feature_dropout.default)
NAMES = (aten.detach.default, aten.alias.default)
SCALES = (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)
SHAPES = (aten.expand.default, aten.view.default, aten.reshape.default)


@rewrite("drop-no-ops", exact=True)
def drop_no_ops(module: GraphModule) -> tuple[list[str], list[Rejection]]:
    """Remove each node without effect, except a dropout that was exported for training."""
    changed = []
    rejected = []
    for node in calls(module, aten._assert_tensor_metadata.default):
        changed.append(node.name)
        module.graph.erase_node(node)
    for node in calls(module, *CASTS, *DROPOUTS, *NAMES, *SCALES, *SHAPES):
        source = node.args[0]
        if node.target in DROPOUTS and arguments(node)["train"]:
            rejected.append(
                Rejection(
                    node.name,
                    "the dropout was exported for training; call eval() before the export",
                )
            )
        elif isinstance(source, Node) and _returns_its_input(node, source):
            changed.append(node.name)
            replace(node, source)
    return changed, rejected


def _returns_its_input(node: Node, source: Node) -> bool:
    if "val" not in source.meta or "val" not in node.meta:
        return False
    if (shape(node), value(node).dtype) != (shape(source), value(source).dtype):
        return False
    if node.target in SCALES:
        return bool(arguments(node)["other"] == 1) and value(node).dtype == torch.float32
    return node.target not in CASTS or not arguments(node).get("copy", False)
