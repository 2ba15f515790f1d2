"""Compute now what no input has a part in: masks, positions, and the lookups between them.

    before   arange(P) ─ unsqueeze ─┬─ le ─ and ─ where(0, -max) ─ mask(1,1,P,P) ──► scores + mask
             arange(P) ─ unsqueeze ─┘
             table(448,d) ── index(arange(P)) ─ rows(1,P,d) ───────────────────────► x + rows
    after    mask(1,1,P,P), a buffer ──────────────────────────────────────────────► scores + mask
             rows(1,P,d), a buffer ────────────────────────────────────────────────► x + rows

Why: accelerators have no int64, no comparison and no gather; transformers' decoder computes its causal
mask with 40 such nodes for every call, of shapes that are known. Measured on ExecuTorch 1.5.1: 39 nodes
of it stayed outside of XNNPACK.
Exact: the same operators, run once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from whisperport.rewrites.base import rewrite
from whisperport.rewrites.graph import replace, store, stored
from whisperport.spec import Rejection

LARGEST = 64 * 2**20  # bytes of one result: the mask of 1500 by 1500 positions has 9 MB


@rewrite("fold-constants", exact=True)
def fold_constants(module: GraphModule) -> tuple[list[str], list[Rejection]]:
    """Store each constant that something needs; decline the large, the random and the transposed."""
    constants = _constants(module)
    values: dict[Node, Any] = {}
    changed: list[str] = []
    rejected: list[Rejection] = []
    for node in [n for n in constants if n.op == "call_function" and _is_needed(n, constants)]:
        if reason := _obstacle(module, node, values):
            rejected.append(Rejection(node.name, reason))
            continue
        with module.graph.inserting_before(node):
            constant = store(module, f"constant_{node.name}", _kept(module, node, values[node]))
        replace(node, constant)
        changed.append(node.name)
    return changed, rejected


def _constants(module: GraphModule) -> dict[Node, None]:
    """The nodes that depend on no input and on nothing that changes, in order."""
    written = {node for user in module.graph.nodes for node in _written_by(user)}
    found: dict[Node, None] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" and node not in written:
            found[node] = None
        elif node.op == "call_function" and not node.is_impure():
            random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if not random and all(source in found for source in node.all_input_nodes):
                found[node] = None
    return found


def _written_by(node: Node) -> list[Node]:
    """The arguments that a call changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    return [
        source
        for source, argument in zip(node.args, schema.arguments, strict=False)
        if isinstance(source, Node) and argument.alias_info and argument.alias_info.is_write
    ]


def _is_needed(node: Node, constants: dict[Node, None]) -> bool:
    return any(user not in constants for user in node.users)


def _obstacle(module: GraphModule, node: Node, values: dict[Node, Any]) -> str:
    """Why this constant is not stored; empty when it can be, and then `values` has it."""
    expected = node.meta.get("val")
    if not isinstance(expected, Tensor):
        return "it gives several tensors"
    size = expected.numel() * expected.element_size()
    if size > LARGEST:
        return f"it has {size} bytes; at most {LARGEST} are stored"
    result = _evaluate(module, node, values)
    if not result.is_contiguous() and _is_weight(module, node, result):
        return "it is a stored weight, transposed; a copy would store it twice"
    return ""


def _kept(module: GraphModule, node: Node, result: Tensor) -> Tensor:
    """A weight in another shape shares its memory; anything else is stored by itself."""
    return result if _is_weight(module, node, result) else result.clone()


def _is_weight(module: GraphModule, node: Node, result: Tensor) -> bool:
    """Whether `result` is all of a stored tensor, in another shape or order."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    weight = stored(module, node)
    return (
        weight is not None
        and weight.numel() == result.numel()
        and weight.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
    )


def _evaluate(module: GraphModule, node: Node, values: dict[Node, Any]) -> Any:
    """The value of a constant node; what it needs is computed first, in the order of the graph."""
    waiting = [node]
    while waiting:
        last = waiting[-1]
        missing = [source for source in last.all_input_nodes if source not in values]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        if last.op == "get_attr":
            values[last] = stored(module, last)
            continue
        args, kwargs = torch.fx.map_arg((last.args, last.kwargs), values.__getitem__)
        function: Any = last.target
        assert callable(function)
        with torch.no_grad():
            values[last] = function(*args, **kwargs)
    return values[node]
