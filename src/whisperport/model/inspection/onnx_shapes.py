"""Infer every static shape of an ONNX model of any exporter.

onnx's own shape inference stops where the graph computes a shape. TorchScript's exporter computes the shape
of a tensor (`Shape`, `Gather`, `Slice`, `Concat`) before each `Reshape`, even if all sizes are fixed. This
module folds the nodes that depend on known shapes only, in one pass, and continues the inference.
"""

import warnings
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference
from onnx.defs import SchemaError, get_schema
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator

OWN_DOMAINS = frozenset({"", "ai.onnx"})
MAX_NODES = 200_000  # Whisper large's decoder has 5,000
CONSTANT_OF_SHAPE, RENAMED = "ConstantOfShape", "whisperport.ConstantOfShape"
MAX_FOLDED_ELEMENTS = 256  # of a tensor that is treated as arithmetic on shapes

# Operators that are computed here if all their inputs are known and small.
FOLDED = frozenset(
    {
        *("Add", "And", "Cast", "Ceil", "Concat", "ConstantOfShape", "Div", "Equal", "Floor"),
        *("Gather", "Greater", "Identity", "Less", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or"),
        *(
            "ReduceProd",
            "Reshape",
            "Slice",
            "Split",
            "Sqrt",
            "Squeeze",
            "Sub",
            "Unsqueeze",
            "Where",
        ),
    }
)


def with_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with local functions inlined, constants as initializers, and static shapes stated.

    Raises:
        ValueError: the local functions expand to too many nodes.
        Exception: onnx raises several classes from C++ if the model is not valid.
    """
    if model.functions:
        _check_expanded_size(model)
        model = inline_local_functions(model)
    _store_constants(model.graph)
    model = _inferred(model)
    _ShapePass(model).run()
    return model


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """Run onnx's shape inference, which also computes small tensors, without ConstantOfShape.

    onnx would allocate every element of a ConstantOfShape, and a file of a hundred bytes can request 2**62
    elements. `_ShapePass` computes small ones.
    """
    _renamed(model, CONSTANT_OF_SHAPE, RENAMED)
    model = shape_inference.infer_shapes(model, data_prop=True)
    _renamed(model, RENAMED, CONSTANT_OF_SHAPE)
    return model


def _renamed(model: onnx.ModelProto, operator: str, name: str) -> None:
    for node in _with_inner(model.graph.node):
        if node.op_type == operator:
            node.op_type = name


Key = tuple[str, str, str]
"""The identity of an ONNX function: domain, name, overload."""


def _check_expanded_size(model: onnx.ModelProto) -> None:
    """Reject a model whose local functions expand to more than `MAX_NODES` nodes."""
    sizes: dict[Key, int] = {}
    for key, function in _callees_first(model):
        sizes[key] = _expanded_size(function.node, sizes)
    if (count := _expanded_size(model.graph.node, sizes)) > MAX_NODES:
        raise ValueError(f"its local functions expand to {count} nodes; the limit is {MAX_NODES}")


def _expanded_size(nodes: Iterable[onnx.NodeProto], sizes: dict[Key, int]) -> int:
    return sum(sizes.get(_called(node), 1) for node in _with_inner(nodes))


def _called(node: onnx.NodeProto) -> Key:
    return _domain(node.domain), node.op_type, node.overload


def _domain(name: str) -> str:
    return "" if name in OWN_DOMAINS else name


def _with_inner(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        yield from inner_nodes(node)


def _callees_first(model: onnx.ModelProto) -> Iterator[tuple[Key, onnx.FunctionProto]]:
    waiting = {(_domain(f.domain), f.name, f.overload): f for f in model.functions}
    while waiting:
        ready = [
            key
            for key, function in waiting.items()
            if not any(_called(n) in waiting for n in _with_inner(function.node))
        ]
        if not ready:
            return  # the functions call each other in a cycle, which onnx rejects
        yield from ((key, waiting.pop(key)) for key in ready)


def _store_constants(graph: onnx.GraphProto) -> None:
    kept = []
    for node in graph.node:
        tensor = _constant(node)
        if tensor is None:
            kept.append(node)
        else:
            tensor.name = node.output[0]
            graph.initializer.append(tensor)
    _put(graph, kept)


def _constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Return the value of a `Constant` node, in any form that ONNX allows; None for other nodes."""
    if node.op_type != "Constant" or node.domain not in OWN_DOMAINS or not node.attribute:
        return None
    attribute = node.attribute[0]
    value = helper.get_attribute_value(attribute)
    if attribute.name == "value":
        copy = onnx.TensorProto()
        copy.CopyFrom(value)
        return copy
    dtypes = {"f": np.float32, "i": np.int64}
    kind = dtypes.get(attribute.name.removeprefix("value_")[:1])
    return None if kind is None else numpy_helper.from_array(np.array(value, kind))


def _put(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    only = onnx.GraphProto(node=nodes)  # a copy
    del graph.node[:]
    graph.node.extend(only.node)


class _ShapePass:
    """Infers shapes and folds nodes in one pass over the nodes of a model."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model, self._graph = model, model.graph
        self._opset = next((o.version for o in model.opset_import if o.domain in OWN_DOMAINS), 0)
        self._types: dict[str, onnx.TypeProto] = {}
        self._data: dict[str, onnx.TensorProto] = {}
        for tensor in self._graph.initializer:
            self._types[tensor.name] = helper.make_tensor_type_proto(
                tensor.data_type, list(tensor.dims)
            )
            inside = tensor.data_location != onnx.TensorProto.EXTERNAL
            if inside and prod(tensor.dims) <= MAX_FOLDED_ELEMENTS:
                self._data[tensor.name] = tensor
        for value in (*self._graph.input, *self._graph.value_info, *self._graph.output):
            self._types.setdefault(value.name, value.type)

    def run(self) -> None:
        """Change the model in place."""
        kept = [node for node in self._graph.node if not self._fold(node)]
        if len(kept) < len(self._graph.node):
            _put(self._graph, kept)
        stated = {value.name for value in (*self._graph.input, *self._graph.output)}
        del self._graph.value_info[:]
        self._graph.value_info.extend(
            helper.make_value_info(name, kind)
            for name, kind in self._types.items()
            if name not in stated
        )
        for value in self._graph.output:
            if value.name in self._types:
                value.type.CopyFrom(self._types[value.name])

    def _fold(self, node: onnx.NodeProto) -> bool:
        """Compute the node if its inputs are known; return whether it was computed and can be removed."""
        if node.domain not in OWN_DOMAINS or any(a.HasField("g") for a in node.attribute):
            return False
        if not all(_is_static(self._types.get(name)) for name in node.output if name):
            self._infer(node)
        arrays = self._computed(node)
        if arrays is None:
            return False
        for name, array in zip(node.output, arrays, strict=True):
            tensor = numpy_helper.from_array(np.asarray(array), name)
            self._data[name] = tensor
            self._graph.initializer.append(tensor)
        return True

    def _infer(self, node: onnx.NodeProto) -> None:
        types = {name: self._types[name] for name in node.input if name in self._types}
        if any(name and name not in types for name in node.input):
            return
        data = {name: self._data[name] for name in node.input if name in self._data}
        try:
            schema = get_schema(node.op_type, self._opset, "")
            result_types = shape_inference.infer_node_outputs(
                schema, node, types, data, opset_imports=list(self._model.opset_import)
            )
        except (SchemaError, shape_inference.InferenceError, RuntimeError, ValueError):
            return  # not known: the nodes that read it have no known shape either
        self._types |= result_types

    def _computed(self, node: onnx.NodeProto) -> list[Any] | None:
        input_type = self._types.get(node.input[0]) if node.input else None
        if node.op_type == "Shape" and input_type is not None and _is_static(input_type):
            between = {a.name: a.i for a in node.attribute}
            sizes = _sizes(input_type)[between.get("start", 0) : between.get("end")]
            return [np.array(sizes, np.int64)]
        if node.op_type not in FOLDED or not all(n in self._data for n in node.input if n):
            return None
        if not self._is_small(node) or self._converts_weight(node):
            return None
        arrays = self._evaluated(node)
        return (
            arrays
            if arrays and all(np.size(array) <= MAX_FOLDED_ELEMENTS for array in arrays)
            else None
        )

    def _converts_weight(self, node: onnx.NodeProto) -> bool:
        """Whether it reads a row of float16: a short bias, and no shape."""
        operand = self._data[node.input[0]]
        is_half = operand.data_type == onnx.TensorProto.FLOAT16
        return node.op_type == "Cast" and is_half and prod(operand.dims) > 1

    def _is_small(self, node: onnx.NodeProto) -> bool:
        """Whether the node's result is small; a file can request tensors of any size."""
        operands = [self._data[name] for name in node.input if name]
        if node.op_type == CONSTANT_OF_SHAPE:
            return (
                prod(max(1, int(n)) for n in numpy_helper.to_array(operands[0]).flat)
                <= MAX_FOLDED_ELEMENTS
            )
        if node.op_type in ("Max", "Min"):  # any number of operands, which broadcast
            return bool(
                prod(max(1, prod(tensor.dims)) for tensor in operands) <= MAX_FOLDED_ELEMENTS**2
            )
        if node.op_type == "Concat":
            return bool(sum(prod(tensor.dims) for tensor in operands) <= MAX_FOLDED_ELEMENTS)
        return True

    def _evaluated(self, node: onnx.NodeProto) -> list[Any] | None:
        names = list(dict.fromkeys(name for name in node.input if name))
        if not all(name in self._types for name in (*names, *node.output)):
            return None
        graph = helper.make_graph(
            [node],
            "one",
            [helper.make_value_info(name, self._types[name]) for name in names],
            [helper.make_value_info(name, self._types[name]) for name in node.output],
        )
        model = helper.make_model(graph, opset_imports=list(self._model.opset_import))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                feed = {name: numpy_helper.to_array(self._data[name]) for name in names}
                return list(ReferenceEvaluator(model).run(None, feed))
        except Exception:  # its Python code raises any class on invalid arguments
            return None


def _sizes(kind: onnx.TypeProto | None) -> list[int]:
    return [axis.dim_value for axis in kind.tensor_type.shape.dim] if kind is not None else []


def _is_static(kind: onnx.TypeProto | None) -> bool:
    return (
        kind is not None
        and kind.HasField("tensor_type")
        and kind.tensor_type.HasField("shape")
        and all(axis.HasField("dim_value") for axis in kind.tensor_type.shape.dim)
    )


def outer_tensors(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names of outer tensors that the subgraphs of a node read, such as the branches of an If."""
    for graph in _graphs(node):
        own = {tensor.name for tensor in graph.initializer} | {v.name for v in graph.input}
        for inner in graph.node:
            yield from (name for name in (*inner.input, *outer_tensors(inner)) if name not in own)
            own.update(inner.output)
        yield from (value.name for value in graph.output if value.name not in own)


def inner_nodes(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Yield all nodes of the subgraphs of a node."""
    for graph in _graphs(node):
        for inner in graph.node:
            yield inner
            yield from inner_nodes(inner)


def _graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs
