"""Programs that turn gradients off inside: torch.export gives that part a graph of its own."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from whisperport.build.check import check
from whisperport.errors import ProgramError
from whisperport.model.inspection.graph import Graph
from whisperport.model.inspection.read import read_graphs
from whisperport.model.inspection.read_exported import read_exported
from whisperport.model.trace.pt2 import read_pt2
from whisperport.model.trace.trial import eager_outputs, random_inputs


class Rotated(nn.Module):
    """As transformers computes rotary embeddings: without gradients, and within it once more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("frequencies", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            angles = y.sum() * self.frequencies
            with torch.enable_grad():
                angles = torch.relu(angles)
            sine, cosine = angles.sin(), angles.cos()
        return self.linear(y * sine + cosine)


@pytest.fixture(scope="module")
def rotated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("no grad") / "rotated.pt2"
    exported = torch.export.export(Rotated().eval(), (torch.randn(1, 8),))
    assert any("wrap_with_set_grad_enabled" in str(node.target) for node in exported.graph.nodes)
    torch.export.save(exported, path)
    return path


def operators(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes)


def test_it_is_read_as_one_graph_and_computes_the_same(rotated: Path) -> None:
    program = read_pt2(rotated)

    inputs = random_inputs(program, 0)
    expected = torch.export.load(rotated).module()(*inputs)
    torch.testing.assert_close(eager_outputs(program, inputs)[0], expected)
    targets = {str(n.target) for n in program.exported.graph.nodes if n.op == "call_function"}
    assert all(target.startswith("aten.") for target in targets)


def test_check_reads_what_lower_reads(rotated: Path) -> None:
    (graph,) = read_graphs(rotated)

    assert operators(graph) == operators(read_exported("x", read_pt2(rotated).exported))
    assert {"sin", "cos", "relu", "linear"} <= operators(graph).keys()
    made = {output.name for node in graph.nodes for output in node.outputs}
    read = {tensor.name for node in graph.nodes for tensor in node.tensors if not tensor.constant}
    assert read <= made | {value.name for value in graph.inputs}


def test_nodes_inside_are_checked_too(rotated: Path) -> None:
    rejected = {group.operator for group in check(rotated, "xnnpack").programs[0].rejected}

    assert "sum" in rejected


def test_a_custom_operator_inside_is_not_run(tmp_path: Path) -> None:
    ran = []

    @torch.library.custom_op("whisperport_test::hidden", mutates_args=())
    def hidden(x: Tensor) -> Tensor:
        ran.append(1)
        return x.clone()

    hidden.register_fake(torch.empty_like)

    class Hidden(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = hidden(x)
            return y + 1.0

    exported = torch.export.export(Hidden(), (torch.randn(2, requires_grad=True),))
    torch.export.save(exported, tmp_path / "hidden.pt2")
    ran.clear()

    with pytest.raises(ProgramError, match="not a standard operator"):
        read_pt2(tmp_path / "hidden.pt2")
    assert ran == []
