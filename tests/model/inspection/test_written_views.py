"""Writes in place through views: what they change is read, and costs what it costs."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from whisperport.model.inspection.check import check_graph
from whisperport.model.inspection.graph import Graph
from whisperport.model.inspection.read import read_graphs
from whisperport.model.inspection.read_exported import read_exported
from whisperport.targets import get_target

from ...drawn_writes import Calls, Step, drawn_writes, function_of
from ...extent import core_or_all

X, Y = torch.randn(1, 8, 8), torch.randn(1, 8, 8)


def part(x: Tensor, y: Tensor) -> Tensor:
    z = torch.relu(x)
    z[:, :2] += torch.sigmoid(y[:, :2])
    return z * 2.0


def all_of_it(x: Tensor, y: Tensor) -> Tensor:
    z = torch.relu(x)[:, :100]
    z += torch.sigmoid(y)
    return z * 2.0


def reshaped(x: Tensor, y: Tensor) -> Tensor:
    z = torch.relu(x)
    z.view(1, 64).mul_(torch.sigmoid(y).reshape(1, 64))
    return z


def sibling(x: Tensor, y: Tensor) -> Tensor:
    z = torch.relu(x)
    rows, column = z[:, 2:4], z[:, :, 1]
    rows.add_(torch.sigmoid(y[:, 2:4]))
    return column * 2.0


def view_of_a_view(x: Tensor, y: Tensor) -> Tensor:
    z = torch.relu(x)
    z.transpose(1, 2)[0][3].copy_(torch.sigmoid(y)[0, 0])
    return z + 1.0


def twice(x: Tensor, y: Tensor) -> Tensor:
    z = torch.relu(x)
    rows = z[:, :2]
    rows.add_(torch.sigmoid(y[:, :2])).mul_(3.0)
    return z + rows.sum()


def not_a_view(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x).add_(torch.sigmoid(y))


def forgotten(x: Tensor, y: Tensor) -> Tensor:
    torch.relu(x)[:, :2].add_(torch.sigmoid(y[:, :2]))
    return x + y


FUNCTIONS = (part, all_of_it, reshaped, sibling, view_of_a_view, twice, not_a_view, forgotten)
COMPUTED = {"relu", "sigmoid", "add", "mul", "sum"}


def exported(function: Callable[[Tensor, Tensor], Any]) -> torch.export.ExportedProgram:
    return torch.export.export(Calls(function), (X, Y))


def computed(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes if node.op in COMPUTED)


def functional(program: torch.export.ExportedProgram) -> Counter[str]:
    """The operators that torch's own functional form has, without those whose results are not read."""
    done = program.run_decompositions({})
    done.graph.eliminate_dead_code()
    return computed(read_exported("functional", done))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__name__)
def test_operators_that_the_result_depends_on_are_those_of_torchs_functional_form(
    function: Callable[[Tensor, Tensor], Any],
) -> None:
    program = exported(function)

    assert computed(read_exported("x", program)) == functional(program)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__name__)
def test_a_file_is_read_as_the_program_is(
    function: Callable[[Tensor, Tensor], Any], tmp_path: Path
) -> None:
    program = exported(function)
    torch.export.save(program, tmp_path / "x.pt2")

    (found,) = read_graphs(tmp_path / "x.pt2")

    expected = read_exported("x", program)
    assert [(n.name, n.inputs, n.outputs) for n in found.nodes] == [
        (n.name, n.inputs, n.outputs) for n in expected.nodes
    ]


@pytest.mark.parametrize(
    ("function", "codes"),
    [
        (part, ["WP310"]),
        (all_of_it, ["WP310"]),
        (reshaped, []),
        (not_a_view, []),
        (twice, ["WP310", "WP310"]),
    ],
)
def test_writes_to_a_part_of_a_tensor_are_copies_that_xnnpack_does_not_run(
    function: Callable[[Tensor, Tensor], Any], codes: list[str]
) -> None:
    graph = read_exported("x", exported(function))

    rejected = check_graph(graph, get_target("xnnpack").spec).rejected

    assert [group.rule for group in rejected if group.rule == "WP310"] == codes


@given(drawn_writes())
@settings(max_examples=core_or_all(12, 200), deadline=None)
def test_any_order_of_views_and_writes_depends_on_what_torch_says(drawn: list[Step]) -> None:
    program = exported(function_of(drawn))

    assert computed(read_exported("x", program)) == functional(program)
