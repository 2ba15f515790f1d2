"""Fold nodes that depend on no input into constants: masks, positions, and lookups of positions.

    before   arange(P) ─ unsqueeze ─┬─ le ─ and ─ where(0, -max) ─ mask(1,1,P,P) ──► scores + mask
             arange(P) ─ unsqueeze ─┘
             table(448,d) ── index(arange(P)) ─ rows(1,P,d) ───────────────────────► x + rows
    after    mask(1,1,P,P), a buffer ──────────────────────────────────────────────► scores + mask
             rows(1,P,d), a buffer ────────────────────────────────────────────────► x + rows

Why: accelerators do not support int64, comparisons or gather. transformers' decoder computes its causal
mask in every call with 40 such nodes; ExecuTorch 1.5.1 delegates 1 of them to XNNPACK.
Exact: the same operators run once, during the rewrite.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from whisperport.model.rewrites.graph_edits import replace, store, stored
from whisperport.model.rewrites.rewrite import rewrite
from whisperport.model.trace.writes import memory_written
from whisperport.program.spec import Rejection

MAX_BYTES = 64 * 2**20  # of one constant; a mask of 1500 by 1500 positions has 9 MB


@rewrite("fold-constants", exact=True)
def fold_constants(module: GraphModule) -> tuple[list[str], list[Rejection]]:
    """Fold each constant, except large ones, random numbers and transposed weights."""
    constants = _constants(module)
    values: dict[Node, Any] = {}
    changed: list[str] = []
    rejected: list[Rejection] = []
    for node in [n for n in constants if n.op == "call_function" and _is_needed(n, constants)]:
        if reason := _obstacle(module, node, values):
            rejected.append(Rejection(node.name, reason))
            continue
        with module.graph.inserting_before(node):
            constant = store(
                module, f"constant_{node.name}", _tensor_to_store(module, node, values[node])
            )
        replace(node, constant)
        changed.append(node.name)
    return changed, rejected


def _constants(module: GraphModule) -> dict[Node, None]:
    """Return the nodes that depend on no input and on no state, in order."""
    written = memory_written(module.graph)
    constants: dict[Node, None] = {}
    for node in module.graph.nodes:
        if node in written:
            continue
        if node.op == "get_attr":
            constants[node] = None
        elif node.op == "call_function" and not node.is_impure():
            random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if not random and all(source in constants for source in node.all_input_nodes):
                constants[node] = None
    return constants


def _is_needed(node: Node, constants: dict[Node, None]) -> bool:
    return any(user not in constants for user in node.users)


def _obstacle(module: GraphModule, node: Node, values: dict[Node, Any]) -> str:
    """Return why this constant cannot be stored; if the result is empty, `values` contains it."""
    expected = node.meta.get("val")
    if not isinstance(expected, Tensor):
        return "the node returns several tensors; only one is supported"
    size = expected.numel() * expected.element_size()
    if size > MAX_BYTES:
        return (
            f"the constant has {size} bytes; the limit is {MAX_BYTES}, which this rewrite sets to keep "
            "files small. If the target rejects the node, store its result as a buffer of the module"
        )
    result = _evaluate(module, node, values)
    if not result.is_contiguous() and _is_weight(module, node, result):
        return "the constant is a transposed stored weight; a copy would store the weight twice"
    return ""


def _tensor_to_store(module: GraphModule, node: Node, result: Tensor) -> Tensor:
    """Return the tensor to store: a reshaped weight shares its memory, every other tensor is copied."""
    return result if _is_weight(module, node, result) else result.clone()


def _is_weight(module: GraphModule, node: Node, result: Tensor) -> bool:
    """Whether `result` has all elements of a stored tensor, and shares its memory."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    weight = stored(module, node)
    return (
        weight is not None
        and weight.numel() == result.numel()
        and weight.untyped_storage().data_ptr() == result.untyped_storage().data_ptr()
    )


def _evaluate(module: GraphModule, node: Node, values: dict[Node, Any]) -> Any:
    """Compute the value of a constant node, and before it the values that it depends on."""
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
