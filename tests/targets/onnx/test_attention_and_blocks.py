"""Attention as one operator and weights in blocks give the same results; other graphs stay as they are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from whisperport.program.bundle import ListedFiles
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.targets.onnx.attention import join_attention
from whisperport.targets.onnx.blocks import COLUMNS, Matrix, matrices, use_blocks
from whisperport.targets.onnx.runner import session_settings

# Attention as one operator gives the same results, and other nodes than that are left alone.

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


# Weights in blocks of columns give the same results; graphs that cannot use blocks are left alone.

K, N = 32, 3 * COLUMNS
WEIGHT = RANDOM.standard_normal((K, N)).astype(np.float32)
BIAS = RANDOM.standard_normal(N).astype(np.float32)
SIZES = {"w": WEIGHT.size}


def weighted_model(
    nodes: Sequence[onnx.NodeProto],
    shape: Sequence[int],
    weight: np.ndarray = WEIGHT,
    outputs: Sequence[str] = ("y",),
) -> onnx.ModelProto:
    weights = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(BIAS, "b")]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(list(nodes), "g", [x], made, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


def in_blocks(model: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, dict[str, Matrix]]:
    """Return the model with every weight in blocks that can be."""
    parsed = read(model, folder)
    found = matrices(parsed, SIZES)
    for tensor in parsed.graph.initializer:
        if tensor.name in found:
            blocks = found[tensor.name].in_blocks(numpy_helper.to_array(model.graph.initializer[0]))
            tensor.dims[:] = blocks.shape
            tensor.raw_data = blocks.tobytes()
    use_blocks(parsed, found)
    return onnx.load_from_string(parsed.SerializeToString()), found


def product_of(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    settings = session_settings(onnxruntime, 1)
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=providers)
    y: np.ndarray = session.run(None, {"x": x})[0]
    return y


MATMUL = [helper.make_node("MatMul", ["x", "w"], ["y"])]
GEMM = [helper.make_node("Gemm", ["x", "w", "b"], ["y"])]
BOTH = [
    helper.make_node("MatMul", ["x", "w"], ["p"]),
    helper.make_node("MatMul", ["x", "w"], ["q"]),
    helper.make_node("Add", ["p", "q"], ["y"]),
]


@pytest.mark.parametrize(
    ("nodes", "shape"),
    [
        (MATMUL, (1, 1, K)),
        (MATMUL, (1, 5, K)),
        (MATMUL, (1, K)),
        (MATMUL, (8, K)),
        (GEMM, (1, K)),
        (GEMM, (8, K)),
        ([helper.make_node("Gemm", ["x", "w"], ["y"], beta=1.0, transB=0)], (8, K)),
        (BOTH, (1, 4, K)),
    ],
    ids=["one token", "tokens", "row", "rows", "bias", "biases", "no bias", "used twice"],
)
def test_blocks_give_the_same_result(
    nodes: list[onnx.NodeProto], shape: tuple[int, ...], tmp_path: Path
) -> None:
    model = weighted_model(nodes, shape)
    x = RANDOM.standard_normal(shape).astype(np.float32)

    changed, found = in_blocks(model, tmp_path)

    assert found == {"w": Matrix(K, N)}
    onnx.checker.check_model(changed, full_check=True)
    expected = product_of(model, x)
    assert product_of(changed, x).shape == expected.shape
    # Sums of 32 products of about 1, perhaps in another order.
    np.testing.assert_allclose(product_of(changed, x), expected, rtol=1e-5, atol=1e-5)


IF = helper.make_node("If", ["c"], ["y"], then_branch=helper.make_graph([], "t", [], []))
ODD = RANDOM.standard_normal((K, N + 1)).astype(np.float32)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (weighted_model(MATMUL, (2, 5, K)), SIZES),
        (weighted_model(MATMUL, (1, 1, 5, K)), SIZES),
        (weighted_model(MATMUL, (1, K), ODD), {"w": ODD.size}),
        (weighted_model(MATMUL, (1, K)), {"w": WEIGHT.size - 1}),
        (weighted_model([helper.make_node("Gemm", ["x", "w"], ["y"], alpha=2.0)], (1, K)), SIZES),
        (weighted_model([helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)], (1, N)), SIZES),
        (weighted_model([helper.make_node("Add", ["w", "b"], ["y"]), *MATMUL], (1, K)), SIZES),
        (weighted_model([helper.make_node("MatMul", ["w", "x"], ["y"])], (N, 2)), SIZES),
        (weighted_model(MATMUL, (1, K), outputs=("y", "w")), SIZES),
        (weighted_model([*MATMUL, IF], (1, K)), SIZES),
    ],
    ids=[
        *("batch", "rank 4", "columns", "other size", "scaled", "transposed", "added", "first"),
        *("output", "inner graph"),
    ],
)
def test_other_uses_of_weights_are_left_alone(
    model: onnx.ModelProto, sizes: dict[str, int], tmp_path: Path
) -> None:
    assert matrices(read(model, tmp_path), sizes) == {}


def test_a_shape_that_is_not_stated_is_not_guessed(tmp_path: Path) -> None:
    model = weighted_model([helper.make_node("Relu", ["x"], ["r"]), *MATMUL], (1, K))
    model.graph.node[1].input[0] = "r"
    del model.graph.value_info[:]

    assert matrices(read(model, tmp_path), SIZES) == {}


def test_other_weights_keep_their_nodes(tmp_path: Path) -> None:
    model = read(weighted_model(MATMUL, (1, K)), tmp_path)
    before = model.SerializeToString()

    use_blocks(model, {})

    assert model.SerializeToString() == before
