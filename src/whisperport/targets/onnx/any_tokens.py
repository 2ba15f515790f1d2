"""One graph for `step` and every `prefill_P`: they differ only in P, the number of tokens of one run.

    step        x (1, 1, d) ──► logits (1, V)
    prefill_4   x (1, 4, d), pick (1, 2, 4) ──► logits (2, V)       one graph, one session:
    prefill_64  x (1, 64, d), pick (1, 2, 64) ──► logits (2, V) ─►  x (1, P, d), pick (1, R, P) ──► (R, V)

A session packs a copy of its weights. In 8 bits a copy takes 28 MB for Whisper tiny, and as much again
while it is packed. Here P becomes an axis of any size, and `step` is a prefill of one token that picks it.
This is done when the programs are loaded, because their files have to be static for other execution
providers, and each program may run on another one.

That no constant of the graph depends on P is shown, not assumed: with P free, the graphs of programs with
different P must be equal, name by name of their inputs and outputs and value by value of their constants.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.program.program_kind import PREFILL, STEP, ProgramKind
from whisperport.program.runner import Array
from whisperport.program.spec import ProgramSpec
from whisperport.targets.onnx.graph import INT_ATTRIBUTE, add_integers, free_caches, integers

TOKENS, PICKED = "P", "R"  # names of axes
X, PICK, LOGITS, KEYS = "x", "pick", "logits", "self_k_"
OLDEST = 15  # opset in which Shape has `start` and `end`

Lowered = tuple[ProgramSpec, OnnxGraph]


def same_but_for_tokens(programs: Sequence[Lowered]) -> tuple[Lowered, ...]:
    """Return `step` and the prefills if their graphs are equal once P is free; else none of them.

    Raises:
        BundleError: a graph cannot be read.
    """
    candidates = [program for program in programs if _is_of_one_text(program[0].kind)]
    sizes = {_tokens(spec) for spec, _ in candidates}
    if len(sizes) < 2 or max(sizes) < 2:
        return ()
    forms = [_form(with_any_tokens(graph, spec)) for spec, graph in candidates]
    same = forms[0] is not None and all(form == forms[0] for form in forms)
    return tuple(sorted(candidates, key=lambda program: -_tokens(program[0]))) if same else ()


def with_any_tokens(graph: OnnxGraph, spec: ProgramSpec) -> Any:
    """Return a parsed model in which the tokens of the cache and of one run have axes of any size.

    Args:
        graph: of a program `step` or `prefill_P`.
        spec: its signature.

    Returns:
        The model; None if its cache has one length only, its inputs are not those of the signature, or its
        opset is too old.
    """
    opset, model = graph.opset(), graph.detach()
    stated = {value.name: _shape(value) for value in model.graph.input}
    tokens = _tokens(spec)
    same = stated == {tensor.name: tensor.shape for tensor in spec.inputs}
    if opset < OLDEST or not same or not free_caches(model):
        return None
    constants = integers(model)
    _measure_cache(model, constants, tokens)
    _free_reshapes(model, constants, tokens)
    _free_shapes(model)
    return model


def picked(spec: ProgramSpec) -> dict[str, Array]:
    """Return the inputs of the joined graph that a program does not have: `step` picks its only row."""
    return {PICK: np.ones((1, 1, 1), np.float32)} if spec.kind.name == STEP else {}


def _is_of_one_text(kind: ProgramKind) -> bool:
    """Return whether a program is `step` or a prefill; `step_B` has another graph."""
    return kind.name in (STEP, PREFILL) and not kind.is_batch


def _tokens(spec: ProgramSpec) -> int:
    """Return P of a program."""
    return spec.kind.tokens or 1


def _measure_cache(model: Any, constants: dict[str, list[int]], tokens: int) -> None:
    """Split probabilities behind the N tokens of the cache, in place of before the last P."""
    keys = next(value.name for value in model.graph.input if value.name.startswith(KEYS))
    length = f"{keys}/length"
    for node in model.graph.node:
        if node.op_type == "Slice":
            bounds = [length if constants.get(name) == [-tokens] else name for name in node.input]
            node.input[:] = bounds
    nodes = [type(node).FromString(node.SerializeToString()) for node in model.graph.node]
    del model.graph.node[:]
    measuring = model.graph.node.add(op_type="Shape", input=[keys], output=[length])
    for name, axis in (("start", 2), ("end", 3)):
        measuring.attribute.add(name=name, i=axis, type=INT_ATTRIBUTE)
    model.graph.node.extend(nodes)


def _free_reshapes(model: Any, constants: dict[str, list[int]], tokens: int) -> None:
    """Let P, and R of the logits, follow from the number of values."""
    for node in model.graph.node:
        sizes = constants.get(node.input[1], []) if node.op_type == "Reshape" else []
        if len(sizes) == 3 and sizes[:2] in ([1, tokens], [1, -1]) and sizes[2] > 0:
            free = [1, -1, sizes[2]]
        elif node.output[0] == LOGITS and len(sizes) == 2 and sizes[1] == -1:
            free = [-1, _shape(_named(model.graph.output, LOGITS))[-1]]
        else:
            continue
        node.input[1] = add_integers(model, f"{node.output[0]}/any_tokens", free)


def _free_shapes(model: Any) -> None:
    """Forget all stated shapes, and name the axes of P and of R in the inputs."""
    del model.graph.value_info[:]
    for value in model.graph.output:
        for axis in value.type.tensor_type.shape.dim:
            axis.dim_value, axis.dim_param = 0, ""
    for name, axes in ((X, {1: TOKENS}), ("mask", {1: TOKENS}), (PICK, {1: PICKED, 2: TOKENS})):
        for value in model.graph.input:
            for axis, letter in axes.items() if value.name == name else ():
                size = value.type.tensor_type.shape.dim[axis]
                size.dim_value, size.dim_param = 0, letter


def _form(model: Any) -> list[Any] | None:
    """Return what a graph computes, without names of tensors between nodes and without `pick`."""
    if model is None:
        return None
    graph = model.graph
    ids: dict[str, Any] = {value.name: value.name for value in graph.input}
    ids |= {
        tensor.name: (tensor.data_type, *tensor.dims, _content(tensor))
        for tensor in graph.initializer
    }
    form: list[Any] = []
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[0] == PICK:
            ids[node.output[0]] = ids[node.input[1]]
            continue
        inputs = tuple(ids.get(name) for name in node.input)
        attributes = sorted(
            attribute.SerializeToString(deterministic=True) for attribute in node.attribute
        )
        form.append((node.domain, node.op_type, inputs, attributes))
        ids |= {name: (len(form), index) for index, name in enumerate(node.output)}
    form.append({value.name: ids.get(value.name) for value in graph.output})
    return form


def _content(tensor: Any) -> Any:
    """Return where a tensor is stored, or its own bytes without the name."""
    if tensor.external_data:
        return tuple(sorted((entry.key, entry.value) for entry in tensor.external_data))
    bare = type(tensor).FromString(tensor.SerializeToString())
    bare.name = ""
    return bare.SerializeToString(deterministic=True)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(axis.dim_value for axis in value.type.tensor_type.shape.dim)


def _named(values: Any, name: str) -> Any:
    return next(value for value in values if value.name == name)
