"""Two consecutive permutes are merged into one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from whisperport.model.rewrites import run_rewrites
from whisperport.model.rewrites.merge_permutes import PERMUTES
from whisperport.model.trace.program import Program
from whisperport.targets import get_target

from ...extent import core_or_all
from .rewriting import operators, reasons, rewritten

NAMES = {str(operator) for operator in PERMUTES}


class Write(nn.Module):
    """Permutes a tensor in one of several ways, and multiplies it, so that the result is not a view."""

    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor) -> Any:
        return self.write(x * 2)


def permutes(program: Program) -> int:
    return sum(name in NAMES for name in operators(program))


@pytest.mark.parametrize(
    ("write", "left"),
    [
        (lambda x: x.permute(0, 2, 1, 3).transpose(-2, -1), 1),
        (lambda x: x.transpose(1, 2).transpose(2, 3).permute(3, -2, 1, -4), 1),
        (lambda x: x.transpose(1, -2).transpose(1, 2), 0),
        (lambda x: x.permute(3, 0, 1, 2).permute(1, 2, 3, 0), 0),
        (lambda x: x.transpose(1, 2).contiguous().transpose(2, 3), 1),
        (lambda x: x.transpose(1, 2).contiguous().transpose(0, 1).view(4, 2, 15), 1),
    ],
    ids=["keys", "three", "there and back", "round", "contiguous", "a view of contiguous rows"],
)
def test_a_chain_becomes_one_or_none(write: Any, left: int, run: Any) -> None:
    before, after, outcome = rewritten("merge-permutes", Write(write), torch.zeros(2, 3, 4, 5))

    assert permutes(after) == left
    assert len(outcome.changed) == permutes(before) - 1
    assert all(map(torch.equal, run(after), run(before)))


@settings(max_examples=core_or_all(25, 300))
@given(st.lists(st.permutations(range(4)), min_size=2, max_size=4))
def test_any_chain_keeps_every_number_in_its_place(run: Any, orders: list[list[int]]) -> None:
    def write(x: Tensor) -> Tensor:
        for order in orders:
            x = x.permute(order)
        return x

    before, after, _ = rewritten("merge-permutes", Write(write), torch.zeros(2, 3, 4, 5))

    assert permutes(after) <= 1
    assert all(map(torch.equal, run(after), run(before)))


@pytest.mark.parametrize("layout", [lambda x: x, Tensor.contiguous], ids=["view", "contiguous"])
def test_one_that_is_read_elsewhere_is_left_with_the_reason(layout: Any) -> None:
    def write(x: Tensor) -> tuple[Tensor, Tensor]:
        heads = layout(x.permute(0, 2, 1, 3))
        return heads + 1, heads.transpose(2, 3) + 1

    before, after, outcome = rewritten("merge-permutes", Write(write), torch.zeros(2, 3, 4, 5))

    assert after is before
    assert "also read by another node" in reasons(outcome)


def test_a_number_without_axes_is_left() -> None:
    before, after, _ = rewritten(
        "merge-permutes", Write(lambda x: x.transpose(0, -1).transpose(0, -1)), torch.zeros(())
    )

    assert after is before


@pytest.mark.parametrize(
    ("of", "merged"),
    [
        ("openai-whisper's encoder", 1),  # of one layer: the keys
        ("openai-whisper's decoder", 2),  # and those of the sound
        ("transformers' eager encoder", 1),
        ("transformers' sdpa decoder", 2),
        ("encoder", 0),  # the built-in encoder transposes its keys once
        ("step", 0),
    ],
)
def test_keys_are_turned_once(programs: dict[str, Program], of: str, merged: int) -> None:
    before = ("drop-no-ops", "fold-constants", "attention-by-softmax", "matmul-by-bmm")

    _, (*_, outcome) = run_rewrites(programs[of], [*before, "merge-permutes"])

    assert len(outcome.changed) == merged


def test_attention_transposes_keys_so_it_is_written_out_first(programs: dict[str, Program]) -> None:
    program = programs["openai-whisper's encoder"]

    _, (early,) = run_rewrites(program, ["merge-permutes"])
    order = get_target("xnnpack").spec.lowering.rewrites

    assert early.changed == ()
    assert order.index("attention-by-softmax") < order.index("merge-permutes")
