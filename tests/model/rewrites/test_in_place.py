"""Operators that write in place, in programs that are rewritten: the results stay, in every run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from whisperport.model.rewrites import REWRITES, run_rewrites
from whisperport.model.trace.program import Program, trace
from whisperport.model.trace.trial import eager_outputs

from ...drawn_writes import Calls, Step, drawn_writes, function_of
from ...extent import core_or_all

EXACT = [one for one in REWRITES.values() if one.exact]


def traced(function: Callable[[Tensor, Tensor], Any]) -> Program:
    return trace("program", Calls(function), (torch.randn(1, 8, 8), torch.randn(1, 8, 8)))


def operators(program: Program) -> list[str]:
    calls = (node for node in program.exported.graph.nodes if node.op == "call_function")
    return [str(node.target) for node in calls]


def assert_equal_in_every_run(first: Program, second: Program) -> None:
    for seed in (0, 1, 1):
        torch.manual_seed(seed)
        given = [torch.randn(1, 8, 8), torch.randn(1, 8, 8)]
        expected = eager_outputs(first, [one.clone() for one in given])
        actual = eager_outputs(second, [one.clone() for one in given])
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def counted(x: Tensor, y: Tensor) -> Tensor:
    """As T5 computes buckets of relative positions."""
    buckets = torch.zeros(8, dtype=torch.int64) + 1
    buckets += torch.where(torch.arange(8) > 3, 2, 1)
    return x + y[0, buckets, 0]


def part(x: Tensor, y: Tensor) -> Tensor:
    mask = torch.ones(8, 8) + 1.0
    mask[:2].mul_(3.0)
    return x * mask + y


def read_before(x: Tensor, y: Tensor) -> Tensor:
    z = torch.relu(x)
    before = z + y
    z.add_(1.0).mul_(2.0)
    return before * z


def scaled_by_one(x: Tensor, y: Tensor) -> Tensor:
    z = torch.relu(x)
    copy = z * 1.0
    copy.add_(y)
    return z * copy


@pytest.mark.parametrize("function", [counted, part, read_before, scaled_by_one])
def test_results_stay(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    program = traced(function)

    rewritten, _ = run_rewrites(program, [one.name for one in EXACT])

    assert_equal_in_every_run(rewritten, program)


def test_a_constant_that_is_written_to_is_folded_with_the_write() -> None:
    rewritten, (outcome,) = run_rewrites(traced(counted), ["fold-constants"])

    assert "add" in outcome.changed[0]
    assert [name for name in operators(rewritten) if "_." in name] == []
    assert "aten.where.ScalarOther" not in operators(rewritten)


def test_a_constant_with_a_view_that_is_written_to_is_not_folded() -> None:
    rewritten, _ = run_rewrites(traced(part), ["fold-constants"])

    assert "aten.mul_.Tensor" in operators(rewritten)


@given(drawn_writes())
@settings(max_examples=core_or_all(6, 200), deadline=None)
def test_any_writes_give_the_same_results_once_rewritten(drawn: list[Step]) -> None:
    program = traced(function_of(drawn, constant=True))

    rewritten, _ = run_rewrites(program, ["drop-no-ops", "fold-constants", "merge-permutes"])

    assert_equal_in_every_run(rewritten, program)
