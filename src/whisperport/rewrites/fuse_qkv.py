"""Join the projections of one input to one: queries, keys and values, and the sound's of all layers.

    before   x(1,P,d) ─┬─ linear(wq(d,d), bq) ─► q(1,P,d)
                       ├─ linear(wk(d,d)) ─────► k(1,P,d)
                       └─ linear(wv(d,d), bv) ─► v(1,P,d)
    after    x(1,P,d) ─── linear(w(3d,d), b) ─ (1,P,3d) ─┬─ slice ─► q(1,P,d)
                                                         ├─ slice ─► k(1,P,d)
                                                         └─ slice ─► v(1,P,d)

Why: a matrix unit fills better with one product of 3d columns than with three of d, and reads x once. What
that gains depends on the device; it was not measured.
Exact: the same products; where only some have a bias, the others get zeros.
"""

from collections import defaultdict

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from whisperport.rewrites.base import rewrite
from whisperport.rewrites.graph import arguments, aten, calls, replace, store, stored
from whisperport.spec import Refusal


@rewrite("fuse-qkv", exact=True)
def fuse_qkv(module: GraphModule) -> tuple[list[str], list[Refusal]]:
    """Join linears of the same input; decline computed weights, and those that are used elsewhere."""
    groups = defaultdict(list)
    for node in calls(module, aten.linear.default):
        groups[node.args[0]].append(node)
    changed: list[str] = []
    refused: list[Refusal] = []
    for group in [group for group in groups.values() if len(group) > 1]:
        reasons = {node: _obstacle(module, node) for node in group}
        refused += [Refusal(node.name, reason) for node, reason in reasons.items() if reason]
        fit = [node for node, reason in reasons.items() if not reason]
        if len(fit) > 1:
            changed += [node.name for node in fit]
            _join(module, fit)
    return changed, refused


def _obstacle(module: GraphModule, node: Node) -> str:
    weight, bias = (arguments(node)[name] for name in ("weight", "bias"))
    if stored(module, weight) is None or (bias is not None and stored(module, bias) is None):
        return "its weight or bias is computed, and not stored"
    if len(weight.users) > 1:
        return "its weight is used elsewhere too; joined, it would be stored twice"
    return ""


def _join(module: GraphModule, group: list[Node]) -> None:
    weights: list[Tensor] = []
    biases: list[Tensor | None] = []
    for node in group:
        given = arguments(node)
        weight = stored(module, given["weight"])
        assert weight is not None
        weights.append(weight)
        biases.append(stored(module, given["bias"]))
    call = module.graph.call_function
    with module.graph.inserting_before(group[0]):
        joined = [store(module, f"{group[0].name}_joined_weight", torch.cat(weights))]
        if any(bias is not None for bias in biases):
            filled = [
                weight.new_zeros(len(weight)) if bias is None else bias
                for weight, bias in zip(weights, biases, strict=True)
            ]
            joined.append(store(module, f"{group[0].name}_joined_bias", torch.cat(filled)))
        product = call(aten.linear.default, (group[0].args[0], *joined))
        start, parts = 0, []
        for weight in weights:
            parts.append(call(aten.slice.Tensor, (product, -1, start, start + len(weight))))
            start += len(weight)
    for node, part in zip(group, parts, strict=True):
        replace(node, part)
