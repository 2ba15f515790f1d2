"""Attention as one operator gives the same results, and other nodes than that are left alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from whisperport.program.bundle import ListedFiles
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.targets.onnx.attention import join_attention
from whisperport.targets.onnx.runner import session_settings

RANDOM = np.random.default_rng(0)
H, P, T, D = 2, 5, 7, 8
SHAPES = {"q": (H, P, D), "rows": (T, H, D), "v": (H, T, D)}
Nodes = list[onnx.NodeProto]


def attention(perm: Sequence[int] = (1, 2, 0), axis: int = -1) -> Nodes:
    return [
        helper.make_node("Transpose", ["rows"], ["k"], perm=perm),
        helper.make_node("MatMul", ["q", "k"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=axis),
        helper.make_node("MatMul", ["weights", "v"], ["y"]),
    ]


def model_of(
    nodes: Nodes, shapes: dict[str, Sequence[int]] | None = None, outputs: Sequence[str] = ("y",)
) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (SHAPES | (shapes or {})).items()
    ]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "g", inputs, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


def read(model: onnx.ModelProto, folder: Path) -> Any:
    """Read a model as the runner does."""
    (folder / "g.onnx").write_bytes(model.SerializeToString())
    return OnnxGraph(ListedFiles(folder, frozenset({"g.onnx"})), "g.onnx").detach()


def computed(model: bytes) -> np.ndarray:
    settings = session_settings(onnxruntime, 1)
    session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(1)
    inputs = {name: random.standard_normal(shape).astype("f") for name, shape in SHAPES.items()}
    y: np.ndarray = session.run(None, inputs)[0]
    return y


def test_one_operator_gives_the_same_result(tmp_path: Path) -> None:
    model = model_of(attention())
    changed = read(model, tmp_path)

    assert join_attention(changed)

    assert [n.op_type for n in changed.graph.node] == ["Transpose", "MultiHeadAttention"]
    # Sums of 8 and of 7 products of about 1, in another order.
    expected = computed(model.SerializeToString())
    np.testing.assert_allclose(computed(changed.SerializeToString()), expected, atol=1e-5)


def changed(index: int, node: onnx.NodeProto) -> Nodes:
    return [node if i == index else other for i, other in enumerate(attention())]


MASK = [
    *attention()[:2],
    helper.make_node("Add", ["scores", "scores"], ["masked"]),
    helper.make_node("Softmax", ["masked"], ["weights"], axis=-1),
    attention()[3],
]
SECOND_USE = [*attention(), helper.make_node("Neg", ["k"], ["other"])]


@pytest.mark.parametrize(
    "model",
    [
        model_of(attention(perm=(1, 0, 2)), {"rows": (D, H, T)}),
        model_of(attention(axis=0)),
        model_of(changed(2, helper.make_node("Softmax", ["scores"], ["weights"]))),
        model_of(changed(2, helper.make_node("Relu", ["scores"], ["weights"]))),
        model_of(changed(3, helper.make_node("MatMul", ["v", "weights"], ["y"])), {"v": (H, D, P)}),
        model_of(MASK),
        model_of(SECOND_USE, outputs=("y", "other")),
        model_of(attention(), outputs=("y", "weights")),
        model_of(attention(), {"q": (1, P, D)}),
        model_of(attention(), {"v": (1, T, D)}),
        model_of(attention(), {"q": ("H", P, D)}),
    ],
    ids=[
        *("other order", "other axis", "no axis", "no softmax", "weights on the right", "mask"),
        *("keys used twice", "weights are a result", "one query", "one value", "unknown size"),
    ],
)
def test_other_nodes_are_left_alone(model: onnx.ModelProto, tmp_path: Path) -> None:
    parsed = read(model, tmp_path)
    before = parsed.SerializeToString()

    assert not join_attention(parsed)
    assert parsed.SerializeToString() == before
