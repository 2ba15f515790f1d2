"""Replace layer normalization by operators whose means are linears with constant weights.

    before   x(…,d) ── layer_norm(w(d), b(d), ε) ───────────────────────────────────────► y(…,d)
    after    x ─┬─ linear(1/d) ─ m(…,1)                 ┌─ linear(1/d) ─ v(…,1) ─ rsqrt(v + ε) ┐
                └──────── x - m ── c(…,d) ──┬── c · c ──┘                                      │
                                            └────────────────── c · r(…,1) · w + b ◄───────────┘ ► y

Why: XNNPACK has no layer norm, and its partitioner supports no mean over the last axis. Measured
with ExecuTorch 1.5.1 on Whisper's encoder: 9 subgraphs and 9 undelegated nodes become 1 subgraph and 0
undelegated nodes.
Exact: a linear with all weights equal to 1/d computes the mean, and the variance is the mean of c · c.
"""

import operator

import torch
from torch.fx import GraphModule, Node

from whisperport.model.rewrites.graph_edits import aten, inherit_origin
from whisperport.model.rewrites.rewrite import rewrite
from whisperport.program.spec import Rejection


@rewrite("layer-norm-by-linear", exact=True)
def layer_norm_by_linear(module: GraphModule) -> tuple[list[str], list[Rejection]]:
    """Replace each layer norm over the last axis."""
    changed: list[str] = []
    rejected: list[Rejection] = []
    # All nodes are checked before the first is replaced, because new nodes have no recorded dtype.
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
    """Return why this layer norm cannot be replaced; empty if it can."""
    axes = node.args[1]
    assert isinstance(axes, list | tuple)
    if len(axes) != 1:
        return f"the layer norm is over {len(axes)} axes; only the last axis is supported"
    dtype = node.all_input_nodes[0].meta["val"].dtype
    if dtype != torch.float32:
        return f"the input is {dtype}; a mean of {dtype} by a linear would lose accuracy"
    if node.target is aten.native_layer_norm.default and any(
        user.target is not operator.getitem or user.args[1] != 0 for user in node.users
    ):
        return "the mean or the reciprocal standard deviation is read by another node"
    return ""


def _replace(module: GraphModule, node: Node) -> None:
    graph = module.graph
    defaults = (None, None, None, None, 1e-5)  # aten's defaults: input, shape, weight, bias, ε
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
    inherit_origin(node, result)

    if node.target is aten.native_layer_norm.default:
        for user in list(node.users):
            user.replace_all_uses_with(result)
            graph.erase_node(user)
    else:
        node.replace_all_uses_with(result)
    graph.erase_node(node)


def _average(module: GraphModule, width: int) -> str:
    """Return the name of a (1, width) buffer of 1/width, which all layer norms of this width share."""
    name = f"average_of_{width}"
    if not hasattr(module, name):
        module.register_buffer(name, torch.full((1, width), 1 / width))
    return name
