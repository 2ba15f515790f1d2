"""What rewrites ask of a graph, and how they put a tensor into one."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

aten = torch.ops.aten


def calls(module: GraphModule, *targets: Any) -> list[Node]:
    """The calls of these operators, in order."""
    return [n for n in module.graph.nodes if n.op == "call_function" and n.target in targets]


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by the names in the operator's schema, its defaults filled in."""
    schema = node.target._schema  # type: ignore[union-attr]  # an OpOverload: `calls` found it
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema.arguments}


def value(node: Node) -> Tensor:
    """The fake tensor that was recorded for a node when the program was exported."""
    recorded = node.meta["val"]
    assert isinstance(recorded, Tensor)
    return recorded


def shape(node: Node) -> list[int]:
    """The static shape of a node's value."""
    return list(value(node).shape)


def stored(module: GraphModule, node: object) -> Tensor | None:
    """The parameter, buffer or constant that `node` reads; None when it is computed or an input."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    found: Any = module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found if isinstance(found, Tensor) else None


def store(module: GraphModule, name: str, tensor: Tensor) -> Node:
    """A new node, at the point of insertion, that reads `tensor`, kept in a buffer of a free name."""
    taken, free, count = set(dir(module)), name, 1
    while free in taken:
        free, count = f"{name}_{count}", count + 1
    module.register_buffer(free, tensor.detach())
    return module.graph.get_attr(free)


def transposed_weight(module: GraphModule, node: object) -> Node | None:
    """The stored matrix (O, I) of which `node` is the transpose (I, O); None when it is none."""
    if not isinstance(node, Node) or not node.all_input_nodes:
        return None
    source = node.all_input_nodes[0]
    matrix = stored(module, source)
    if matrix is None or matrix.dim() != 2 or node.op != "call_function":
        return None
    if node.target in (aten.t.default, aten.numpy_T.default, aten.mT.default):
        return source
    if node.target == aten.transpose.int and {int(axis) % 2 for axis in node.args[1:3]} == {0, 1}:  # type: ignore[arg-type]
        return source
    if node.target == aten.permute.default and [axis % 2 for axis in node.args[1]] == [1, 0]:  # type: ignore[union-attr,operator]
        return source
    return None


def is_vocabulary(linear: Node) -> bool:
    """Whether a linear widens more than 4 times: Whisper's feed-forward by 4, its vocabulary by 40."""
    wide, narrow = shape(linear)[-1], shape(arguments(linear)["input"])[-1]
    return wide > 4 * narrow


def replace(old: Node, new: Node) -> None:
    """Let all who used `old` use `new`, of the same shape and dtype, and take `old` out."""
    new.meta.setdefault("val", old.meta.get("val"))  # the next match may ask for its shape
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)
