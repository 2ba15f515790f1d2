"""Write a linear as a convolution with a kernel of one by one.

    before   x(1,P,I) ── linear(w(O,I), b(O)) ────────────────────────────────────────────► y(1,P,O)
    after    x ─ transpose ─ (1,I,P) ─ reshape ─ (1,I,1,P) ─ conv2d(w(O,I,1,1), b(O)) ─┐
                                       y(1,P,O) ◄── transpose ── (1,O,P) ── reshape ───┘

Why: compilers of image accelerators schedule convolutions best, and some take no matrix product of rank 3.
Exact: the same products and sums. The weight is the same memory in another shape.
"""

import math

from torch.fx import GraphModule, Node

from whisperport.rewrites.base import rewrite
from whisperport.rewrites.graph import arguments, aten, calls, replace, shape, store, stored
from whisperport.spec import Refusal


@rewrite("linear-by-conv1x1", exact=True)
def linear_by_conv1x1(module: GraphModule) -> tuple[list[str], list[Refusal]]:
    """Replace each linear of a stored weight; decline computed ones."""
    changed: list[str] = []
    refused: list[Refusal] = []
    for node in calls(module, aten.linear.default):
        if stored(module, arguments(node)["weight"]) is None:
            refused.append(Refusal(node.name, "its weight is computed, and not stored"))
            continue
        _replace(module, node)
        changed.append(node.name)
    return changed, refused


def _replace(module: GraphModule, node: Node) -> None:
    given, size = arguments(node), shape(node)
    weight = stored(module, given["weight"])
    assert weight is not None
    (wide, narrow), rows = weight.shape, math.prod(size[:-1])
    call = module.graph.call_function
    with module.graph.inserting_before(node):
        kernel = store(module, f"{node.name}_kernel", weight[:, :, None, None])
        x = call(aten.reshape.default, (given["input"], [1, rows, narrow]))
        x = call(aten.transpose.int, (x, 1, 2))
        x = call(aten.reshape.default, (x, [1, narrow, 1, rows]))
        x = call(aten.conv2d.default, (x, kernel, given["bias"]))
        x = call(aten.reshape.default, (x, [1, wide, rows]))
        x = call(aten.transpose.int, (x, 1, 2))
        x = call(aten.reshape.default, (x, size))
    replace(node, x)
