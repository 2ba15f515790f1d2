"""Graphs of a few nodes, and a target that supports little, for tests of rules."""

from dataclasses import replace
from typing import Any

from whisperport.model.inspection.graph import Format, Graph, Node, Quantization, Value, build
from whisperport.program.spec import Limit, Support, TargetSpec

NPU = TargetSpec(
    name="npu",
    summary="a processor for images, which no one builds",
    supports=Support(
        operators=frozenset(
            {"add", "conv", "linear", "matmul", "mul", "reshape", "softmax", "transpose"}
        ),
        max_rank=4,
        formats=frozenset({"torch", "onnx"}),
        limits=(
            Limit(rule="WP203", value=frozenset({"float32"}), source="its manual, page 2"),
            Limit(
                rule="WP205",
                value=frozenset({4}),
                source="its manual, page 3",
                rewrite="conv1d-by-conv2d",
            ),
            Limit(
                rule="WP207",
                value=20_000,
                source="its manual, page 4",
                rewrite="split-vocab-projection",
            ),
            Limit(rule="WP208", value=1, source="its manual, page 5"),
            Limit(rule="WP401", value=frozenset({13, 17}), source="its manual, page 6"),
        ),
    ),
    sources=dict.fromkeys(("operators", "max_rank", "dtypes", "formats", "static"), "its manual"),
)


def value(name: str, *shape: int | str, dtype: str = "float32", constant: bool = False) -> Value:
    return Value(name, shape, dtype, constant)


def weight(name: str, *shape: int, dtype: str = "float32") -> Value:
    return Value(name, shape, dtype, constant=True)


def quantized(of: Value, scales: int = 1, *, symmetric: bool = True) -> Value:
    return replace(of, quantization=Quantization(scales, symmetric))


def node(op: str, inputs: list[Value], *outputs: Value, **attributes: Any) -> Node:
    """Named after its first output."""
    custom = "." in op
    made = tuple(outputs)
    return Node(f"{op}_of_{made[0].name}", op, op, tuple(inputs), made, attributes, custom)


def graph(
    *nodes: Node,
    inputs: list[Value] | None = None,
    format: Format = "torch",
    opset: int | None = None,
) -> Graph:
    """A graph; its inputs are the tensors that no node computes, its outputs are those of the last node."""
    made = {out.name for n in nodes for out in n.outputs}
    given = {v.name: v for n in nodes for v in n.tensors if not v.constant and v.name not in made}
    return build("it", format, nodes, inputs or given.values(), nodes[-1].outputs, opset)
