"""Small compiled programs with undelegated nodes."""

from pathlib import Path
from typing import Any

import pytest
from fuzz.seeds import product_sum_product, xnnpack_pte

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
