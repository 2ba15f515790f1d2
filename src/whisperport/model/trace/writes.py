"""Which tensors of a torch graph share memory, and which a node writes to."""

from operator import getitem

import torch
from torch import Tensor
from torch.fx import Graph, Node


def memory_written(graph: Graph) -> dict[Node, None]:
    """Return the nodes whose memory a node writes to, also through views, in the order of the writes."""
    nodes: dict[Node, None] = {}
    for node in graph.nodes:
        for written in written_by(node):
            nodes[written] = None
            while is_view(written) and written.all_input_nodes:
                written = written.all_input_nodes[0]
                nodes[written] = None
    return nodes


def written_by(node: Node) -> list[Node]:
    """Return the arguments that a call changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    return [
        source
        for source, argument in zip(node.args, schema.arguments, strict=False)
        if isinstance(source, Node) and argument.alias_info and argument.alias_info.is_write
    ]


def is_view(node: Node) -> bool:
    """Whether the result shares memory with the first argument, according to the operator's schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.target is getitem  # of a list of views
    if node.target.overloadpacket is torch.ops.aten.to and _dtype(node) != _dtype(node.args[0]):  # type: ignore[union-attr]  # an OpOverload: it has a schema
        return False  # the schema describes a cast to the same dtype, which does not copy
    return any(returned.alias_info is not None for returned in schema.returns)


def _dtype(node: object) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dtype if isinstance(value, Tensor) else None
