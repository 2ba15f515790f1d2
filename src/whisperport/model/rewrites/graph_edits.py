"""Helpers for rewrites: read nodes of a graph, replace nodes, and store tensors."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

aten = torch.ops.aten
ORIGIN = ("nn_module_stack", "stack_trace")  # names in the metadata of a node


def calls(module: GraphModule, *targets: Any) -> list[Node]:
    """Return the nodes that call one of these operators, in order."""
    return [n for n in module.graph.nodes if n.op == "call_function" and n.target in targets]


def arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a call by name, with the defaults of the operator's schema."""
    schema = node.target._schema  # type: ignore[union-attr]  # an OpOverload: `calls` found it
    values = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    return {a.name: values.get(a.name, a.default_value) for a in schema.arguments}


def value(node: Node) -> Tensor:
    """Return the fake tensor that torch.export recorded for a node."""
    recorded = node.meta["val"]
    assert isinstance(recorded, Tensor)
    return recorded


def shape(node: Node) -> list[int]:
    """Return the static shape of a node's value."""
    return list(value(node).shape)


def stored(module: GraphModule, node: object) -> Tensor | None:
    """Return the parameter, buffer or constant that `node` reads; None if it is computed or an input."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    attribute: Any = module
    for part in str(node.target).split("."):
        attribute = getattr(attribute, part)
    return attribute if isinstance(attribute, Tensor) else None


def store(module: GraphModule, name: str, tensor: Tensor) -> Node:
    """Store a tensor in a new buffer, and return a new node that reads it, at the point of insertion.

    Args:
        name: of the buffer; a number is appended if the name exists.
    """
    names, free, count = set(dir(module)), name, 1
    while free in names:
        free, count = f"{name}_{count}", count + 1
    module.register_buffer(free, tensor.detach())
    return module.graph.get_attr(free)


def transposed_weight(module: GraphModule, node: object) -> Node | None:
    """Return the node of a stored matrix (O, I) if `node` is its transpose (I, O); otherwise None."""
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
    """Whether a linear is a vocabulary projection: its output is more than 4 times as wide as its input.

    Whisper's feed-forward layer widens by 4, its vocabulary projection by about 40.
    """
    wide, narrow = shape(linear)[-1], shape(arguments(linear)["input"])[-1]
    return wide > 4 * narrow


def replace(old: Node, new: Node) -> None:
    """Replace `old` by `new`, which has the same shape and dtype, and remove `old`."""
    new.meta.setdefault("val", old.meta.get("val"))  # a later match may read its shape
    inherit_origin(old, new)
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def inherit_origin(old: Node, new: Node) -> None:
    """Give `new`, and the nodes that were made for it, the module and the line of Python of `old`."""
    origin = {key: old.meta[key] for key in ORIGIN if old.meta.get(key)}
    nodes = [new] if origin else []
    for node in nodes:
        if node.op == "call_function" and not any(node.meta.get(key) for key in ORIGIN):
            node.meta |= origin
            nodes += node.all_input_nodes
