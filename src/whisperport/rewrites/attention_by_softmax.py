"""Write fused attention as two products and a softmax, with a finite mask.

    before   q(1,H,P,D), k(1,H,T,D), v(1,H,T,D) ── scaled_dot_product_attention ──► y(1,H,P,D)
    after    q · s ──────────┐
             k ─ transpose ──┴─ matmul ─ (1,H,P,T) ─ + mask(P,T) ─ softmax ─┐
             v(1,H,T,D) ────────────────────────────────────────────────────┴─ matmul ──► y(1,H,P,D)

The mask holds 0 where a row may look and -30000 where not: exp(-30000) is 0 in float32, and the number
fits float16. `is_causal` and a mask of booleans become such a mask; a mask of numbers is limited to it.
Why: accelerators take no fused attention, and its decomposition tests for rows that see nothing
(`any`, `eq`, `where`) on the host: measured on ExecuTorch 1.5.1, Whisper tiny's encoder took 722 ms so
and 327 ms without. An infinite mask gives NaN where a quantizer multiplies it by 0.
Exact: a row that may look nowhere aside, which fused attention answers with zeros and this with a mean.
A stored mask with such a row is declined.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from whisperport.rewrites.base import rewrite
from whisperport.rewrites.graph import arguments, aten, calls, replace, shape, store, stored, value
from whisperport.spec import Rejection

MASKED = -30_000.0


@rewrite("attention-by-softmax", exact=True)
def attention_by_softmax(module: GraphModule) -> tuple[list[str], list[Rejection]]:
    """Replace each fused attention; decline dropout, grouped queries, and rows that see nothing."""
    changed: list[str] = []
    rejected: list[Rejection] = []
    masks: dict[Any, Node] = {}  # one node for all layers that share a mask
    for node in calls(module, aten.scaled_dot_product_attention.default):
        given = arguments(node)
        if reason := _obstacle(module, given):
            rejected.append(Rejection(node.name, reason))
            continue
        _replace(module, node, given, masks)
        changed.append(node.name)
    return changed, rejected


def _obstacle(module: GraphModule, given: dict[str, Any]) -> str:
    if given["dropout_p"]:
        return f"it drops {given['dropout_p']} of its weights; call eval() before exporting"
    if given["enable_gqa"]:
        return "its queries share keys in groups; Whisper has one key a query"
    if value(given["query"]).dtype != torch.float32:
        return f"its input is {value(given['query']).dtype}; only float32 is handled"
    mask = given["attn_mask"]
    if mask is not None and _sees_nothing(stored(module, mask)):
        return "its mask has a row that may look nowhere: fused attention answers it with zeros"
    return ""


def _sees_nothing(mask: Tensor | None) -> bool:
    if mask is None:
        return False
    open_ = mask if mask.dtype == torch.bool else mask > MASKED
    return not bool(open_.any(dim=-1).all())


def _replace(module: GraphModule, node: Node, given: dict[str, Any], masks: Any) -> None:
    q, k, v = given["query"], given["key"], given["value"]
    scale = given["scale"] if given["scale"] is not None else 1 / math.sqrt(shape(q)[-1])
    mask = _mask(module, node, given, masks)
    call = module.graph.call_function
    with module.graph.inserting_before(node):
        scaled = q if scale == 1 else call(aten.mul.Tensor, (q, scale))
        scores = call(aten.matmul.default, (scaled, call(aten.transpose.int, (k, -2, -1))))
        if mask is not None:
            scores = call(aten.add.Tensor, (scores, mask))
        weights = call(aten.softmax.int, (scores, -1))
        result = call(aten.matmul.default, (weights, v))
    replace(node, result)


def _mask(module: GraphModule, node: Node, given: dict[str, Any], masks: Any) -> Node | None:
    """A node with what is added to the scores; None where every row may look everywhere."""
    mask, rows, columns = given["attn_mask"], shape(given["query"])[-2], shape(given["key"])[-2]
    key = mask if mask is not None else (rows, columns)
    if mask is None and not given["is_causal"]:
        return None
    if key not in masks:
        at = node if mask is None else _after(mask)
        with module.graph.inserting_before(at):
            if mask is None:
                seen = torch.ones(rows, columns, dtype=torch.bool).tril()
                masks[key] = store(module, f"causal_{rows}_{columns}", _as_numbers(seen))
            elif (known := stored(module, mask)) is not None:
                masks[key] = store(module, f"finite_{mask.name}", _as_numbers(known))
            else:
                masks[key] = _computed(module, mask)
    return masks[key]  # type: ignore[no-any-return]


def _after(node: Node) -> Node:
    return node.next if node.op != "placeholder" else _first_call(node)


def _first_call(node: Node) -> Node:
    while node.op == "placeholder":
        node = node.next
    return node


def _as_numbers(mask: Tensor) -> Tensor:
    """0 where a row may look, MASKED where not; numbers are kept down to MASKED."""
    if mask.dtype != torch.bool:
        return mask.to(torch.float32).clamp(min=MASKED)
    return torch.zeros(mask.shape).masked_fill(~mask, MASKED)


def _computed(module: GraphModule, mask: Node) -> Node:
    """The same for a mask that is computed or given: in arithmetic, without a comparison."""
    call = module.graph.call_function
    if value(mask).dtype != torch.bool:
        return call(aten.clamp.default, (mask, MASKED))
    seen = call(aten.to.dtype, (mask, torch.float32))
    return call(aten.mul.Tensor, (call(aten.sub.Tensor, (seen, 1.0)), -MASKED))
