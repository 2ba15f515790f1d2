"""Replace operators that write in place by those that return a new tensor, before a program is rewritten.

    before   y = x + 1 ──► y.mul_(m) ──► y (the same memory)
    after    y = x + 1 ──► z = y * m ──► z

Why: a rewrite replaces one node and looks at its inputs and its users. A write changes a tensor that other
nodes read too, so that the replaced node would be written to, or be read before the write.
"""

import torch
from torch.fx import GraphModule, Node, map_arg

from whisperport.model.rewrites.graph import aten
from whisperport.model.trace.writes import is_view, written_by


def remove_writes(module: GraphModule) -> None:
    """Replace each write to a tensor that no view, input or stored tensor shares by its functional form."""
    for node in list(module.graph.nodes):
        match written_by(node):
            case [tensor] if tensor is node.args[0] and _is_alone(tensor):
                if functional := _functional(node):
                    node.target = functional
                    for user in [user for user in tensor.users if user > node]:
                        user.replace_input_with(tensor, node)


def _is_alone(node: Node) -> bool:
    """Whether `node` computes a tensor that no other node shares, except those that write to it."""
    views = (user for user in node.users if is_view(user) and node not in written_by(user))
    return node.op == "call_function" and not is_view(node) and not any(views)


def _functional(node: Node) -> torch._ops.OpOverload | None:
    """Return the operator that computes what `node` writes, if its result has the same shape and dtype."""
    packet, overload = node.target._schema.name, node.target._overloadname  # type: ignore[union-attr]
    name = packet.removeprefix("aten::")
    functional = getattr(getattr(aten, name.removesuffix("_"), None), overload, None)
    if not name.endswith("_") or functional is None or functional._schema.is_mutable:
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    try:
        result = functional(*args, **kwargs)
    except (RuntimeError, TypeError):  # the functional form has other arguments
        return None
    same = (result.shape, result.dtype) == (node.meta["val"].shape, node.meta["val"].dtype)
    return functional if same else None
