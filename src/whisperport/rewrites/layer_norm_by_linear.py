"""Write layer normalization with its means as constant-weight linears.

    before   x(…,d) ── layer_norm(w(d), b(d), ε) ───────────────────────────────────────► y(…,d)
    after    x ─┬─ linear(1/d) ─ m(…,1)                 ┌─ linear(1/d) ─ v(…,1) ─ rsqrt(v + ε) ┐
                └──────── x - m ── c(…,d) ──┬── c · c ──┘                                      │
                                            └────────────────── c · r(…,1) · w + b ◄───────────┘ ► y

Why: XNNPACK has no layer norm, and its partitioner takes no mean over the last axis; a linear it does.
Measured on ExecuTorch 1.5.1: Whisper's encoder goes from 9 subgraphs and 9 undelegated nodes to 1 and 0.
Exact: a linear with every weight 1/d is the mean, and the variance is the mean of c · c.
"""

import operator

import torch
from torch.fx import GraphModule, Node

from whisperport.rewrites.base import rewrite
from whisperport.rewrites.graph import aten
from whisperport.spec import Rejection


@rewrite("layer-norm-by-linear", exact=True)
def layer_norm_by_linear(module: GraphModule) -> tuple[list[str], list[Rejection]]:
    """Replace each layer norm over the last axis; decline the others."""
    changed: list[str] = []
    rejected: list[Rejection] = []
    # All are judged before any is replaced: what is put in has no recorded dtype to judge by.
    for node, reason in [(node, _obstacle(node)) for node in _layer_norms(module)]:
        if reason:
            rejected.append(Rejection(node.name, reason))
            continue
        _replace(module, node)
        changed.append(node.name)
    return changed, rejected


def _layer_norms(module: GraphModule) -> list[Node]:
    targets = (aten.layer_norm.default, aten.native_layer_norm.default)
    return [node for node in module.graph.nodes if node.target in targets]


def _obstacle(node: Node) -> str:
    """Why this layer norm cannot be written so; empty when it can."""
    axes = node.args[1]
    assert isinstance(axes, list | tuple)
    if len(axes) != 1:
        return f"it normalizes over {len(axes)} axes; only the last one is handled"
    dtype = node.all_input_nodes[0].meta["val"].dtype
    if dtype != torch.float32:
        return f"its input is {dtype}; means of {dtype} by a linear would lose accuracy"
    if node.target is aten.native_layer_norm.default and any(
        user.target is not operator.getitem or user.args[1] != 0 for user in node.users
    ):
        return "its mean or its reciprocal deviation is used elsewhere"
    return ""


def _replace(module: GraphModule, node: Node) -> None:
    graph = module.graph
    defaults = (None, None, None, None, 1e-5)  # aten's own: input, shape, weight, bias, ε
    x, axes, weight, bias, epsilon = (node.args + defaults[len(node.args) :])[:5]
    assert isinstance(axes, list | tuple)
    average = _average(module, int(axes[0]))  # type: ignore[arg-type]  # one static size

    with graph.inserting_before(node):
        weights = graph.get_attr(average)
        mean = graph.call_function(aten.linear.default, (x, weights))
        centred = graph.call_function(aten.sub.Tensor, (x, mean))
        square = graph.call_function(aten.mul.Tensor, (centred, centred))
        variance = graph.call_function(aten.linear.default, (square, weights))
        raised = graph.call_function(aten.add.Tensor, (variance, epsilon))
        scale = graph.call_function(aten.rsqrt.default, (raised,))
        result = graph.call_function(aten.mul.Tensor, (centred, scale))
        if weight is not None:
            result = graph.call_function(aten.mul.Tensor, (result, weight))
        if bias is not None:
            result = graph.call_function(aten.add.Tensor, (result, bias))

    if node.target is aten.native_layer_norm.default:
        for user in list(node.users):
            user.replace_all_uses_with(result)
            graph.erase_node(user)
    else:
        node.replace_all_uses_with(result)
    graph.erase_node(node)


def _average(module: GraphModule, width: int) -> str:
    """The name of a (1, width) buffer of 1/width, one for all layer norms of that width."""
    name = f"average_of_{width}"
    if not hasattr(module, name):
        module.register_buffer(name, torch.full((1, width), 1 / width))
    return name
