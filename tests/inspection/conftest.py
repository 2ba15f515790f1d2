"""Compiled programs that are small, and leave something off the accelerator."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session")
def naive_pte(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token ids (1, 8) to logits (8, 500): an embedding, two products, and logits as `x @ E.T`.

    XNNPACK's partitioner leaves out the lookup, a scalar product and the logits' `mm`.
    """
    return _lowered(tmp_path_factory.mktemp("naive") / "naive.pte", linear_head=False)


@pytest.fixture(scope="session")
def mended_pte(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, with the logits by `F.linear`."""
    return _lowered(tmp_path_factory.mktemp("mended") / "mended.pte", linear_head=True)


def _lowered(path: Path, *, linear_head: bool) -> Path:
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    from whisperport.inspection.quiet import quiet

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(500, 64)
            self.first = torch.nn.Linear(64, 256)
            self.second = torch.nn.Linear(256, 64)

        def forward(self, tokens: Any) -> Any:
            x = self.embedding(tokens)[0]
            x = x + self.second(torch.nn.functional.gelu(self.first(x)))
            if linear_head:
                return torch.nn.functional.linear(x, self.embedding.weight)
            return x @ torch.transpose(self.embedding.weight, 0, 1)

    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        exported = torch.export.export(Decoder().eval(), (tokens,))
        edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
        path.write_bytes(edge.to_executorch().buffer)
    return path


@pytest.fixture(scope="session")
def step_xml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's step as an OpenVINO IR, `.bin` beside it."""
    import openvino

    from whisperport.transcription import default_bundle

    path = tmp_path_factory.mktemp("openvino") / "step.xml"
    model = openvino.Core().read_model(default_bundle() / "onnxruntime" / "step.onnx")
    openvino.save_model(model, path, compress_to_fp16=False)
    return path


@pytest.fixture(scope="session")
def cumsum_tflite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x (4, 64) through a product, a cumulative sum that XNNPACK does not have, and a product."""
    path = tmp_path_factory.mktemp("tflite") / "cumsum.tflite"
    path.write_bytes(_three_operators(64))
    return path


@pytest.fixture(scope="session")
def wide_tflite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of width 2048, so that a product takes a while."""
    path = tmp_path_factory.mktemp("tflite") / "wide.tflite"
    path.write_bytes(_three_operators(2048))
    return path


def _three_operators(width: int) -> bytes:
    """A flatbuffer, put together with the schema that LiteRT's wheel brings."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as tflite

    random = np.random.default_rng(0)
    weight = random.standard_normal((width, width)).astype(np.float32)
    contents = [None, weight, np.zeros(width, np.float32), np.array(1, np.int32), None, None, None]
    names = ["x", "weight", "bias", "axis", "product", "sum", "out"]
    shapes = [[4, width], [width, width], [width], [], *[[4, width]] * 3]
    model, graph = tflite.ModelT(), tflite.SubGraphT()
    model.version, model.subgraphs, model.buffers = 3, [graph], [tflite.BufferT()]
    graph.tensors, graph.inputs, graph.outputs = [], [0], [6]
    for name, shape, content in zip(names, shapes, contents, strict=True):
        tensor, buffer = tflite.TensorT(), tflite.BufferT()
        tensor.name, tensor.shape, tensor.buffer = name, shape, 0
        tensor.type = tflite.TensorType.INT32 if name == "axis" else tflite.TensorType.FLOAT32
        if content is not None:
            buffer.data = np.frombuffer(content.tobytes(), np.uint8)
            model.buffers.append(buffer)
            tensor.buffer = len(model.buffers) - 1
        graph.tensors.append(tensor)
    operators, options = tflite.BuiltinOperator, tflite.BuiltinOptions
    product = (tflite.FullyConnectedOptionsT(), options.FullyConnectedOptions)
    running = (tflite.CumsumOptionsT(), options.CumsumOptions)
    model.operatorCodes, graph.operators = [], []
    for number, (code, inputs, output, (option, kind)) in enumerate(
        [
            (operators.FULLY_CONNECTED, [0, 1, 2], 4, product),
            (operators.CUMSUM, [4, 3], 5, running),
            (operators.FULLY_CONNECTED, [5, 1, 2], 6, product),
        ]
    ):
        known, operator = tflite.OperatorCodeT(), tflite.OperatorT()
        known.builtinCode, known.deprecatedBuiltinCode, known.version = code, min(code, 127), 1
        operator.opcodeIndex, operator.inputs, operator.outputs = number, inputs, [output]
        operator.builtinOptions, operator.builtinOptionsType = option, kind
        model.operatorCodes.append(known)
        graph.operators.append(operator)
    builder = flatbuffers.Builder(0)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())
