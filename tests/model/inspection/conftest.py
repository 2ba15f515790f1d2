"""What tests of inspection share: graphs of a few nodes, a target of few operators, compiled programs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fuzz.seeds import product_sum_product, xnnpack_pte

from whisperport.model.inspection.graph import Format, Graph, Node, Quantization, Value, build
from whisperport.program.spec import Limit, Support, TargetSpec

from ...embedded import default_bundle


@pytest.fixture(scope="session")
def naive_pte(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token ids (1, 8) to logits (8, 500): an embedding, two matmuls, and logits as `x @ E.T`.

    XNNPACK's partitioner does not delegate the lookup, a multiplication by a scalar and the logits' `mm`.
    """
    return _lowered(tmp_path_factory.mktemp("naive") / "naive.pte", linear_head=False)


@pytest.fixture(scope="session")
def fixed_pte(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same program, with the logits computed by `F.linear`."""
    return _lowered(tmp_path_factory.mktemp("fixed") / "fixed.pte", linear_head=True)


def _lowered(path: Path, *, linear_head: bool) -> Path:
    import torch

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

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Decoder().eval()
    path.write_bytes(xnnpack_pte(module, (torch.zeros(1, 8, dtype=torch.int64),)))
    return path


@pytest.fixture(scope="session")
def step_xml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default bundle's `step` as an OpenVINO IR, with its `.bin` in the same folder."""
    import openvino

    path = tmp_path_factory.mktemp("openvino") / "step.xml"
    model = openvino.Core().read_model(default_bundle() / "onnxruntime" / "step.onnx")
    openvino.save_model(model, path, compress_to_fp16=False)
    return path


@pytest.fixture(scope="session")
def cumsum_tflite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .tflite: x (4, 64), a matmul, a cumulative sum that XNNPACK does not support, and a matmul."""
    path = tmp_path_factory.mktemp("tflite") / "cumsum.tflite"
    path.write_bytes(product_sum_product(64))
    return path


@pytest.fixture(scope="session")
def wide_tflite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with width 2048, so that a matmul has a measurable time."""
    path = tmp_path_factory.mktemp("tflite") / "wide.tflite"
    path.write_bytes(product_sum_product(2048))
    return path


# Graphs of a few nodes, and a target that supports little, for tests of rules.

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
