"""Host rewrites move the right steps, give reasons for others, and do not change results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whisperport.errors import LoweringError
from whisperport.model.rewrites import HOST_REWRITES, Outcome, run_host_rewrite, run_rewrites
from whisperport.model.trace.program import Program, trace
from whisperport.model.trace.trial import random_inputs
from whisperport.program.host_part import HostPart
from whisperport.verification import REWRITTEN
from whisperport.verification.equality import compare_sample, eager_arrays

IDS = torch.zeros(1, 5, dtype=torch.long)
X = torch.zeros(1, 5, 8)


class Module(nn.Module):
    """A table of 30 rows of 8, positions, and what a test makes of them."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)
        self.positions = nn.Parameter(torch.randn(5, 8))
        self.made = forward

    def forward(self, *given: Tensor) -> Any:
        return self.made(self, *given)


def moved(
    name: str, forward: Callable[..., Any], *inputs: Tensor
) -> tuple[Program, Program, HostPart, Outcome]:
    """Before, after, the host part and the outcome; equal through the host part."""
    torch.manual_seed(0)
    before, _ = run_rewrites(trace("it", Module(forward), inputs), ["drop-no-ops"])
    after, host, outcome = run_host_rewrite(before, name)
    given = random_inputs(before, 1)
    names = [tensor.name for tensor in before.spec.inputs]
    arrays = host.inputs({n: x.numpy() for n, x in zip(names, given, strict=True)})
    made = eager_arrays(after, [torch.from_numpy(arrays[t.name]) for t in after.spec.inputs])
    actual, expected = host.outputs(made), eager_arrays(before, given)
    assert all(row.comparison for row in compare_sample("", actual, expected, REWRITTEN["float32"]))
    assert list(actual) == list(expected) or host.joins
    return before, after, host, outcome


def operators(program: Program) -> list[str]:
    nodes = program.exported.graph.nodes
    return [str(node.target) for node in nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    ("forward", "inputs", "adds_positions"),
    [
        (lambda m, ids: m.table(ids).relu(), (IDS,), False),
        (lambda m, ids: (m.table(ids) + m.positions).relu(), (IDS,), True),
        (lambda m, ids: (m.positions + m.table(ids)).relu(), (IDS,), True),
        (lambda m, ids: m.table(ids.view(-1, 5)).relu(), (IDS,), False),
        (lambda m, ids: m.table(ids.long()).relu(), (IDS.int(),), False),
        (lambda m, ids, x: (m.table(ids) + x).relu(), (IDS, X), False),
        (lambda m, ids: (m.table(ids) * 8**0.5 + m.positions).relu(), (IDS,), False),
    ],
    ids=["alone", "positions", "positions first", "view", "cast", "another input", "scaled"],
)
def test_a_lookup_moves_with_the_positions_that_are_added_to_it(
    forward: Callable[..., Any], inputs: tuple[Tensor, ...], adds_positions: bool
) -> None:
    _, after, host, outcome = moved("lookup-on-host", forward, *inputs)

    (lookup,) = host.lookups
    assert len(outcome.changed) == 1
    assert (lookup.positions is not None) == adds_positions
    assert after.spec.inputs[0].name == "embeddings"
    assert after.spec.inputs[0].shape == (1, 8, 5, 1)
    assert not any("embedding" in name for name in operators(after))


@pytest.mark.parametrize(
    ("layout", "added"),
    [
        (lambda x: x.unsqueeze(1).transpose(1, -1), 0),  # as published graphs have it
        (lambda x: x.permute(0, 2, 1).unsqueeze(-1), 0),
        (lambda x: x.unsqueeze(-1), 2),  # of the same size, and another order
    ],
)
def test_a_graph_is_cut_where_its_rows_are_channels_first(
    layout: Callable[[Tensor], Tensor], added: int
) -> None:
    _, after, _, _ = moved("lookup-on-host", lambda m, ids: layout(m.table(ids)).relu(), IDS)

    assert "aten.relu.default" in operators(after)
    kept = 1 if added else 0  # the unsqueeze
    assert len(operators(after)) == 1 + added + kept


def test_two_lookups_of_two_inputs_move_both() -> None:
    _, after, host, _ = moved(
        "lookup-on-host", lambda m, a, b: m.table(a) * m.table(b) + m.positions, IDS, IDS + 1
    )

    assert len(host.lookups) == 2
    assert len({tensor.name for tensor in after.spec.inputs}) == 2


@pytest.mark.parametrize(
    ("forward", "inputs", "reason"),
    [
        (lambda m, ids: m.table(ids) * ids[..., None], (IDS,), "another node reads this input too"),
        (lambda m, ids: m.table(ids + 1), (IDS,), "another node reads this input too"),
        (lambda m, ids: m.table(ids), (IDS.expand(2, 5),), "(2, 5, 8)"),
        (lambda m, ids: nn.functional.embedding(ids, m.table.weight * 2), (IDS,), "computed"),
    ],
    ids=["read elsewhere", "computed ids", "batch", "computed table"],
)
def test_a_lookup_that_cannot_move_is_declined(
    forward: Callable[..., Any], inputs: tuple[Tensor, ...], reason: str
) -> None:
    program = trace("it", Module(forward), inputs)

    after, host, outcome = run_host_rewrite(program, "lookup-on-host")

    assert after is program
    assert not host
    assert reason in outcome.rejected[0].reason


def test_a_join_at_the_end_moves_and_other_outputs_keep_their_names() -> None:
    def forward(_: nn.Module, x: Tensor) -> Any:
        return x.sin(), torch.cat([x.relu(), x.exp(), x.cos()], -1)

    before, after, host, _ = moved("join-on-host", forward, X)

    (join,) = host.joins
    name = before.spec.outputs[1].name
    assert join.pieces == (f"{name}_0", f"{name}_1", f"{name}_2")
    assert [t.name for t in after.spec.outputs] == [before.spec.outputs[0].name, *join.pieces]
    assert "aten.cat.default" not in operators(after)


def _read_elsewhere(_: nn.Module, x: Tensor) -> Any:
    joined = torch.cat([x.relu(), x.exp()], -1)
    return joined, joined.sin()


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (_read_elsewhere, "also read by another node"),
        (lambda _, x: torch.cat([x.relu(), x], -1), "contains an input"),
        (lambda _, x: torch.cat([x.relu()] * 2, -1) * 1.0, ""),
        (lambda _, x: torch.cat([x.relu(), x.exp()], 1), ""),
    ],
    ids=["read elsewhere", "an input", "not the end", "another axis"],
)
def test_a_join_that_cannot_move_is_declined(forward: Callable[..., Any], reason: str) -> None:
    program = trace("it", Module(forward), (X,))

    after, host, outcome = run_host_rewrite(program, "join-on-host")

    assert after is program
    assert not host
    assert reason in " ".join(rejection.reason for rejection in outcome.rejected)


@pytest.mark.parametrize("name", HOST_REWRITES)
def test_every_file_is_named_after_its_rewrite_and_shows_its_picture(name: str) -> None:
    module = f"whisperport.model.rewrites.{name.replace('-', '_')}"
    words = __import__(module, fromlist=["x"]).__doc__

    assert HOST_REWRITES[name].__module__ == module
    assert all(part in words for part in ("before ", "after ", "Why: ", "Exact: "))


def test_a_name_that_is_not_there_is_an_error() -> None:
    program = trace("it", nn.ReLU(), (X,))

    with pytest.raises(LoweringError, match="no host rewrite is called 'toast'"):
        run_host_rewrite(program, "toast")
