"""Replace a matmul with a transposed stored matrix by a linear with a constant weight.

    before   w(V,d) ── transpose ── (d,V) ─┐
             x(1,P,d) ─────────────────────┴─ matmul ──► logits(1,P,V)
    after    x(1,P,d) ── linear(w(V,d)) ───────────────► logits(1,P,V)

Why: openai-whisper multiplies by the transpose of its token embedding, and XNNPACK's partitioner supports
a matmul only if its matrix is a stored constant. Measured with ExecuTorch 1.5.1 on tiny.en with 128
tokens and one thread: this matmul is 55 % of the decoder's time.
Exact: a linear multiplies by the transpose of its weight. The weight is not copied.
"""

from torch.fx import GraphModule, Node

from whisperport.model.rewrites.graph_edits import (
    arguments,
    aten,
    calls,
    replace,
    shape,
    stored,
    transposed_weight,
)
from whisperport.model.rewrites.rewrite import rewrite
from whisperport.program.spec import Rejection


@rewrite("matmul-by-linear", exact=True)
def matmul_by_linear(module: GraphModule) -> tuple[list[str], list[Rejection]]:
    """Replace each matmul whose right operand is the transpose of a stored matrix."""
    changed: list[str] = []
    rejected: list[Rejection] = []
    for node in calls(module, aten.matmul.default, aten.mm.default, aten.addmm.default):
        args = arguments(node)
        x, right = (
            (args["mat1"], args["mat2"])
            if node.target is aten.addmm.default
            else (args["self"], args.get("other", args.get("mat2")))
        )
        weight = transposed_weight(module, right)
        bias = args["self"] if node.target is aten.addmm.default else None
        if weight is None:
            if stored(module, right) is not None:
                reason = (
                    "the matrix is stored without a transpose; a linear needs a transposed copy"
                )
                rejected.append(Rejection(node.name, reason))
            continue
        if reason := _obstacle(args, bias, weight):
            rejected.append(Rejection(node.name, reason))
            continue
        with module.graph.inserting_before(node):
            linear = module.graph.call_function(aten.linear.default, (x, weight, bias))
        replace(node, linear)
        changed.append(node.name)
    return changed, rejected


def _obstacle(args: dict[str, object], bias: object, weight: Node) -> str:
    if bias is None:
        return ""
    if (args["alpha"], args["beta"]) != (1, 1):
        return f"alpha is {args['alpha']} and beta is {args['beta']}; only 1 is supported"
    if not isinstance(bias, Node) or shape(bias) != shape(weight)[:1]:
        return "the added tensor does not have one number per output column, as the bias of a linear has"
    return ""
