"""Rewrites of matmuls and attention: by linear, by bmm, split into pieces, by softmax."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from whisperport.model.rewrites import run_rewrites
from whisperport.model.rewrites.merge_permutes import PERMUTES
from whisperport.model.trace.program import Program, trace
from whisperport.model.trace.pt2 import read_pt2
from whisperport.targets import get_target

from ...extent import core_or_all
from .conftest import EXACT, operators, random_tensor, reasons, rewritten

# Rewrites of matmuls: by linear, by bmm, and split into pieces.


class StoredMatmul(nn.Module):
    """Multiplies its input by a stored matrix (24, 8), in one of several ways of writing it."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(random_tensor(24, 8))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.write(x, self.weight)


@pytest.mark.parametrize(
    "write",
    [
        lambda x, w: x @ w.t(),
        lambda x, w: x @ w.T,
        lambda x, w: torch.matmul(x, w.transpose(-1, -2)),
        lambda x, w: torch.matmul(x, w.permute(1, 0)),
        lambda x, w: torch.mm(x, w.t()),
        lambda x, w: torch.addmm(w[:, 0].clone(), x, w.t()),
    ],
    ids=["t", "T", "transpose", "permute", "mm", "addmm"],
)
def test_a_transposed_matrix_makes_a_linear(write: Any, run: Any, largest_error: Any) -> None:
    before, after, outcome = rewritten("matmul-by-linear", StoredMatmul(write), torch.zeros(5, 8))

    assert len(outcome.changed) == 1
    assert "aten.linear.default" in operators(after)
    assert largest_error(run(after), run(before)) <= EXACT


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda x, w: x @ w[:8].clone().t(), ""),
        (lambda x, w: x.reshape(-1, 24) @ w, "without a transpose"),
        (lambda x, w: torch.addmm(w[:, 0].clone(), x, w.t(), alpha=2), "alpha is 2"),
        (
            lambda x, w: torch.addmm(torch.ones(5, 24), x, w.t()),
            "does not have one number per output column",
        ),
    ],
)
def test_other_matmuls_do_not_change_and_stored_ones_are_explained(write: Any, reason: str) -> None:
    before, after, outcome = rewritten(
        "matmul-by-linear",
        StoredMatmul(write),
        torch.zeros(3, 8)
        if "alpha" in reason
        else torch.zeros(6, 8)
        if "without" in reason
        else torch.zeros(5, 8),
    )

    assert after is before
    assert reason in reasons(outcome)
    assert bool(outcome.rejected) == bool(reason)


class Matmul(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


@pytest.mark.parametrize("outer", [(1, 3), (2, 3), (2, 1, 3)])
def test_matmuls_of_many_matrices_become_one_bmm(
    outer: tuple[int, ...], run: Any, largest_error: Any
) -> None:
    sides = torch.zeros(*outer, 5, 4), torch.zeros(*outer, 4, 6)

    before, after, outcome = rewritten("matmul-by-bmm", Matmul(), *sides)

    assert len(outcome.changed) == 1
    assert "aten.matmul.default" not in operators(after)
    assert largest_error(run(after), run(before)) <= EXACT


def test_sides_of_other_outer_sizes_are_declined() -> None:
    sides = torch.zeros(2, 3, 5, 4), torch.zeros(1, 3, 4, 6)

    before, after, outcome = rewritten("matmul-by-bmm", Matmul(), *sides)

    assert after is before
    assert "[2, 3] and [1, 3]" in reasons(outcome)


def test_matmuls_of_two_matrices_do_not_change() -> None:
    _, _, outcome = rewritten("matmul-by-bmm", Matmul(), torch.zeros(5, 4), torch.zeros(4, 6))

    assert (outcome.changed, outcome.rejected) == ((), ())


def head(vocabulary: int, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(8, vocabulary, bias=bias)
    layer.weight.data = random_tensor(vocabulary, 8)
    return layer


@pytest.mark.parametrize(("asked", "sizes"), [("", [12, 12, 12, 15]), ("=2", [25, 26])])
@pytest.mark.parametrize("bias", [False, True])
def test_the_vocabulary_is_cut_in_the_pieces_asked_for(
    asked: str, sizes: list[int], bias: bool, run: Any, largest_error: Any
) -> None:
    name = f"split-vocab-projection{asked}"

    before, after, outcome = rewritten(name, head(51, bias), torch.zeros(1, 5, 8))

    linears = [n for n in after.exported.graph.nodes if n.target == torch.ops.aten.linear.default]
    assert [node.meta["val"].shape[-1] for node in linears] == sizes
    assert outcome.rewrite == name
    assert largest_error(run(after), run(before)) <= EXACT


@pytest.mark.filterwarnings("ignore:No complete tensor")  # torch stores the complete memory anyway
def test_a_cut_vocabulary_takes_no_more_room_in_a_file(
    tmp_path: Path, run: Any, largest_error: Any
) -> None:
    before, after, _ = rewritten("split-vocab-projection", head(50_000), torch.zeros(1, 5, 8))
    torch.export.save(before.exported, tmp_path / "before.pt2")
    torch.export.save(after.exported, tmp_path / "after.pt2")

    grown = (tmp_path / "after.pt2").stat().st_size - (tmp_path / "before.pt2").stat().st_size

    assert grown < 0.05 * 50_000 * 8 * 4
    assert largest_error(run(read_pt2(tmp_path / "after.pt2")), run(before)) <= EXACT


@pytest.mark.parametrize(
    ("asked", "vocabulary", "reason"),
    [
        ("=60", 51, "51 columns cannot be split into 60"),
        ("=1", 51, "number of pieces is 1"),
        ("", 32, ""),
    ],
)
def test_what_is_not_cut_and_why(asked: str, vocabulary: int, reason: str) -> None:
    name = f"split-vocab-projection{asked}"

    before, after, outcome = rewritten(name, head(vocabulary), torch.zeros(1, 5, 8))

    assert after is before
    assert reason in reasons(outcome)
    assert bool(outcome.rejected) == bool(reason)


def test_a_computed_weight_is_declined() -> None:
    class Computed(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return nn.functional.linear(x, w)

    program = trace("one", Computed(), (torch.zeros(5, 8), torch.zeros(40, 8)))

    after, (outcome,) = run_rewrites(program, ["split-vocab-projection"])

    assert after is program
    assert "computed" in reasons(outcome)


def test_the_program_is_the_same_object_where_nothing_changed() -> None:
    program: Program = trace("one", nn.ReLU(), (torch.zeros(3),))

    after, _ = run_rewrites(program, ["matmul-by-bmm"])

    assert after is program


# Two consecutive permutes are merged into one.

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


# Attention by softmax: every form of mask, against torch's fused attention; and what is declined.

NAME = "attention-by-softmax"
Q, K = torch.zeros(1, 3, 5, 8), torch.zeros(1, 3, 7, 8)


class Attention(nn.Module):
    def __init__(self, mask: Tensor | None = None, **options: Any) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.mask, **self.options)


SEEN = torch.tensor([[True, False, True, True, False, True, True]] * 5)


@pytest.mark.parametrize(
    "attention",
    [
        Attention(),
        Attention(is_causal=True),
        Attention(scale=1.0),
        Attention(scale=0.3, is_causal=True),
        Attention(SEEN),
        Attention(SEEN[None, None]),
        Attention(torch.where(SEEN, random_tensor(5, 7), -torch.inf)),
        Attention(torch.where(SEEN, 0.0, torch.finfo(torch.float32).min)),
    ],
    ids=["plain", "causal", "scale 1", "both", "booleans", "rank 4", "infinite", "lowest"],
)
def test_every_mask_is_made_finite_and_agrees(
    attention: Attention, run: Any, largest_error: Any
) -> None:
    before, after, outcome = rewritten(NAME, attention, Q, K, K)

    assert len(outcome.changed) == 1
    assert "aten.softmax.int" in operators(after)
    assert largest_error(run(after), run(before)) <= EXACT
    for tensor in {**after.exported.state_dict, **after.exported.constants}.values():
        assert tensor.dtype == torch.float32
        assert tensor.min() >= -30_000


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_mask_that_is_given_is_handled(kind: torch.dtype, run: Any, largest_error: Any) -> None:
    class Given(nn.Module):
        def forward(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, k, mask)

    mask = SEEN if kind == torch.bool else torch.where(SEEN, 0.0, -torch.inf)
    before, after, outcome = rewritten(NAME, Given(), Q, K, mask)
    q, k = random_tensor(*Q.shape), random_tensor(*K.shape)

    expected = before.exported.module()(q, k, mask)
    actual = after.exported.module()(q, k, mask)

    assert len(outcome.changed) == 1
    assert largest_error([actual], [expected]) <= EXACT
    assert not any("where" in name or "eq" in name for name in operators(after))


def test_layers_share_one_mask() -> None:
    class Two(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            once = F.scaled_dot_product_attention(q, q, q, is_causal=True)
            return F.scaled_dot_product_attention(once, once, once, is_causal=True)

    _, after, outcome = rewritten(NAME, Two(), Q)

    assert len(outcome.changed) == 2
    assert len({**after.exported.state_dict, **after.exported.constants}) == 1


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (Attention(dropout_p=0.1), "a dropout of 0.1"),
        (Attention(torch.zeros(5, 7, dtype=torch.bool)), "excludes every position"),
        (Attention(torch.full((5, 7), -torch.inf)), "excludes every position"),
    ],
)
def test_it_declines_with_a_reason(attention: Attention, reason: str) -> None:
    before, after, outcome = rewritten(NAME, attention, Q, K, K)

    assert after is before
    assert reason in reasons(outcome)


def test_grouped_queries_are_declined() -> None:
    _, _, outcome = rewritten(NAME, Attention(enable_gqa=True), Q, K[:, :1], K[:, :1])

    assert "grouped queries" in reasons(outcome)


def test_half_precision_is_declined() -> None:
    _, _, outcome = rewritten(NAME, Attention(), Q.bfloat16(), K.bfloat16(), K.bfloat16())

    assert "bfloat16" in reasons(outcome)
