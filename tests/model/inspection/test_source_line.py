"""The line of a model's own code in a node's stack trace, and the module that the node is in."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from whisperport.model.inspection.read_exported import read_exported
from whisperport.model.inspection.read_onnx import read_onnx
from whisperport.model.inspection.read_pt2 import read_pt2
from whisperport.model.inspection.source_line import SourceLine, innermost_line

PACKAGES = "/venv/lib/python3.11/site-packages"
TRACE = f"""File "/home/me/model.py", line 12, in forward
    y = self.block(x)
  File "{PACKAGES}/whisper/model.py", line 46, in forward
    return F.linear(
  File "{PACKAGES}/torch/nn/modules/linear.py", line 134, in forward
    return F.linear(input, self.weight, self.bias)"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x @ x.transpose(0, 1)  # the line of the matmul


INPUT = (torch.zeros(3, 4),)
LINE = inspect.getsourcelines(Model.forward)[1] + 3


def test_the_innermost_line_that_is_not_of_torch_is_found() -> None:
    found = innermost_line(TRACE)

    assert found == SourceLine(f"{PACKAGES}/whisper/model.py", 46, "return F.linear(")
    assert found.package_path == "whisper/model.py"


def test_a_trace_of_torch_alone_gives_its_innermost_line() -> None:
    found = innermost_line(TRACE[TRACE.index(f'File "{PACKAGES}/torch') :])

    assert found is not None
    assert (found.package_path, found.line) == ("torch/nn/modules/linear.py", 134)


def test_frames_without_code_and_paths_of_windows_are_read() -> None:
    trace = 'File "<stdin>", line 7, in forward\n  File "C:\\a\\site-packages\\b\\c.py", line 3, in forward'

    found = innermost_line(trace)

    assert found is not None
    assert (found.package_path, found.line, found.code) == ("b/c.py", 3, "")


@pytest.mark.parametrize(
    "trace", ["", "no frame", 'File "a", line 99999999999, in f', 'File "' * 9999]
)
def test_what_is_no_trace_has_no_line(trace: str) -> None:
    assert innermost_line(trace) is None


def test_nodes_of_a_pt2_and_of_an_exported_program_know_module_and_line(tmp_path: Path) -> None:
    exported = torch.export.export(Model().eval(), INPUT, strict=False)
    torch.export.save(exported, tmp_path / "model.pt2")

    (stored,) = read_pt2(tmp_path / "model.pt2")

    for graph in (stored, read_exported("model", exported)):
        norm, *_, matmul = graph.nodes
        assert norm.module == "blocks.0.norm"
        assert matmul.module == ""
        assert matmul.source == SourceLine(
            __file__, LINE, "return x @ x.transpose(0, 1)  # the line of the matmul"
        )


@pytest.mark.parametrize("dynamo", [True, False])
def test_nodes_of_an_onnx_file_know_their_scope(dynamo: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    torch.onnx.export(Model().eval(), INPUT, path, dynamo=dynamo, external_data=False)

    norm, *_, matmul = read_onnx(path).nodes

    assert norm.module == ("blocks.0.norm" if dynamo else "/blocks.0/norm")
    assert matmul.module == ""
    assert matmul.source is None or matmul.source.line == LINE
    assert (matmul.source is not None) == dynamo  # TorchScript's exporter stores no line
