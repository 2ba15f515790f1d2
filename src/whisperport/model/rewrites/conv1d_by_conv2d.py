"""Replace rank-3 convolutions, such as Whisper's two audio convolutions, by rank-4 convolutions.

    before   x(B,C,T) ── conv1d(w(O,C,K), stride s, padding p) ────────────────────────────► y(B,O,T')
    after    x ─ reshape ─ (B,C,1,T) ─ conv2d(w(O,C,1,K), (1,s), (0,p)) ─ reshape ─ (B,O,T') ► y(B,O,T')

Why: compilers made for images do not support convolutions of rank 3.
Exact: the added axis has length 1, so the sums do not change.
"""

from typing import Any

from torch.fx import GraphModule, Node

from whisperport.model.rewrites.graph_edits import (
    arguments,
    aten,
    calls,
    replace,
    shape,
    store,
    stored,
)
from whisperport.model.rewrites.rewrite import rewrite
from whisperport.program.spec import Rejection

CONVOLUTIONS = (aten.conv1d.default, aten.conv1d.padding, aten.convolution.default)


@rewrite("conv1d-by-conv2d", exact=True)
def conv1d_by_conv2d(module: GraphModule) -> tuple[list[str], list[Rejection]]:
    """Replace each rank-3 convolution, except with a computed weight, named padding or transposition."""
    changed: list[str] = []
    rejected: list[Rejection] = []
    for node in calls(module, *CONVOLUTIONS):
        args = arguments(node)
        if len(shape(node)) != 3:
            continue
        if reason := _obstacle(module, args):
            rejected.append(Rejection(node.name, reason))
            continue
        _replace(module, node, args)
        changed.append(node.name)
    return changed, rejected


def _obstacle(module: GraphModule, args: dict[str, Any]) -> str:
    if stored(module, args["weight"]) is None:
        return "the weight is computed, not stored; only a stored weight is supported"
    if isinstance(args["padding"], str):
        return f"the padding is {args['padding']!r}; only a number is supported"
    if args.get("transposed"):
        return "the convolution is transposed; this is not supported"
    return ""


def _replace(module: GraphModule, node: Node, args: dict[str, Any]) -> None:
    x, weight = args["input"], stored(module, args["weight"])
    assert weight is not None
    batch, channels, length = shape(x)
    numbers = [
        [outer, *args[name]] for name, outer in (("stride", 1), ("padding", 0), ("dilation", 1))
    ]
    call = module.graph.call_function
    with module.graph.inserting_before(node):
        kernel = store(module, f"{node.name}_kernel", weight.unsqueeze(2))
        flat = call(aten.reshape.default, (x, [batch, channels, 1, length]))
        result = call(aten.conv2d.default, (flat, kernel, args["bias"], *numbers, args["groups"]))
        result = call(aten.reshape.default, (result, shape(node)))
    replace(node, result)
