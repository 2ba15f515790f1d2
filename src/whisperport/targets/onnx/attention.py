"""Let ONNX Runtime's CPU compute attention without a matrix of scores.

    q (H, P, D) ── MatMul ── scores (H, P, T) ── Softmax ── MatMul ── (H, P, D)
    k (H, D, T) ───┘                                          v (H, T, D)

In a window of 30 s, P and T are 1500: the scores and their softmax are 54 MB each in Whisper tiny. ONNX
Runtime's operator MultiHeadAttention computes them in parts that fit into a cache, in 0.9 of the time. Keys
are transposed in the graph; the operator reads them as they were. This is done when a program is loaded for
the CPU, because most other execution providers have no such operator, and read the same file.

Source of the operator: onnxruntime docs/ContribOperators.md.
"""

from collections.abc import Sequence
from typing import Any

from whisperport.targets.onnx.graph import (
    FLOAT_ATTRIBUTE,
    INT_ATTRIBUTE,
    forget,
    stated_shapes,
    uses_of,
)

DOMAIN = "com.microsoft"
TRANSPOSED, HEADS_FIRST = [1, 2, 0], [1, 0, 2]  # of (T, H, D): to (H, D, T), to (H, T, D)


def join_attention(model: Any) -> bool:
    """Replace every attention without a mask by one node, where its keys are transposed for it alone.

    Args:
        model: a parsed ONNX model, which is changed.

    Returns:
        Whether there was one.
    """
    graph = model.graph
    made_by = {name: node for node in graph.node for name in node.output}
    uses = uses_of(model)
    gone: set[str] = set()
    for node in graph.node:
        softmax = made_by.get(node.input[0]) if node.op_type == "MatMul" else None
        scores = made_by.get(softmax.input[0]) if softmax is not None and softmax.input else None
        keys = (
            made_by.get(scores.input[1]) if scores is not None and len(scores.input) > 1 else None
        )
        if softmax is None or scores is None or keys is None:
            continue
        inner = (*softmax.output, *scores.output, *keys.output)
        if any(uses[name] != 1 for name in inner) or not _is_attention(keys, scores, softmax):
            continue
        q, k, v = scores.input[0], scores.input[1], node.input[1]
        shapes = stated_shapes(model, (q, k, v))
        if not _fit(*(shapes.get(name, ()) for name in (q, k, v))):
            continue
        keys.attribute[0].ints[:] = HEADS_FIRST
        _become_attention(node, (q, k, v))
        gone.update(inner)
    if gone:
        _remove(model, gone)
    return bool(gone)


def _is_attention(keys: Any, scores: Any, softmax: Any) -> bool:
    axis = [(attribute.name, attribute.i) for attribute in softmax.attribute]
    order = [(attribute.name, list(attribute.ints)) for attribute in keys.attribute]
    return (
        (keys.op_type, scores.op_type, softmax.op_type) == ("Transpose", "MatMul", "Softmax")
        and axis == [("axis", -1)]
        and order == [("perm", TRANSPOSED)]
    )


def _fit(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> bool:
    """Return whether the shapes are (H, P, D), (H, D, T) and (H, T, D), none of them 0."""
    if not len(q) == len(k) == len(v) == 3 or not min(*q, *k, *v) > 0:
        return False
    return q[0] == k[0] and q[2] == k[1] and (k[0], k[2], k[1]) == tuple(v)


def _become_attention(node: Any, inputs: Sequence[str]) -> None:
    """Change a MatMul to an attention of one head, whose batch is the heads."""
    node.op_type, node.domain = "MultiHeadAttention", DOMAIN
    node.input[:] = inputs
    node.attribute.add(name="num_heads", i=1, type=INT_ATTRIBUTE)
    node.attribute.add(name="scale", f=1.0, type=FLOAT_ATTRIBUTE)  # queries are scaled already


def _remove(model: Any, gone: set[str]) -> None:
    """Remove the nodes MatMul and Softmax that make these tensors, and what the graph states of them."""
    graph = model.graph
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        if node.op_type in ("MatMul", "Softmax") and gone & {*node.output}:
            del graph.node[index]
    forget(model, gone)
    if DOMAIN not in {opset.domain for opset in model.opset_import}:
        model.opset_import.add(domain=DOMAIN, version=1)
