"""Third-party programs of a few weights as ONNX files, and samples of their inputs."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH, TOKENS, POSITIONS, PIECES = 8, 4, 6, 2


def onnx_file(
    path: Path, nodes: list[Any], inputs: dict[str, Any], outputs: dict[str, Any], **weights: Any
) -> Path:
    def values(named: dict[str, Any]) -> list[Any]:
        return [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in named.items()]

    random = np.random.default_rng(0)
    stored = [
        numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name)
        for name, shape in weights.items()
    ]
    graph = helper.make_graph(nodes, path.stem, values(inputs), values(outputs), stored)
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=9), path)
    return path


def decoder_file(path: Path) -> Path:
    """Write a decoder: embedded tokens and features in, the vocabulary's logits out in pieces."""
    pieces = {f"logits_{i}": (1, TOKENS, 5) for i in range(PIECES)}
    nodes = [
        helper.make_node("Transpose", ["features"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["embedded", "turned"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "features"], ["attended"]),
        *(
            helper.make_node("MatMul", ["attended", f"table_{i}"], [name])
            for i, name in enumerate(pieces)
        ),
    ]
    inputs = {"embedded": (1, TOKENS, WIDTH), "features": (1, POSITIONS, WIDTH)}
    return onnx_file(
        path, nodes, inputs, pieces, **{f"table_{i}": (WIDTH, 5) for i in range(PIECES)}
    )


def decoder_inputs(seed: int) -> dict[str, np.ndarray]:
    """Return random inputs of the decoder."""
    random = np.random.default_rng(seed)
    shapes = {"embedded": (1, TOKENS, WIDTH), "features": (1, POSITIONS, WIDTH)}
    return {n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def write_calls(folder: Path) -> Path:
    """Write three samples of the decoder's inputs: two folders of arrays, and an .npz file."""
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        for tensor, array in decoder_inputs(ord(name)).items():
            np.save(folder / name / f"{tensor}.npy", array)
    np.savez(folder / "c.npz", **decoder_inputs(ord("c")))
    return folder
