"""Rewrites that remove or fold nodes, and convolutions over one axis."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from whisperport.model.rewrites import fold_constants
from whisperport.model.trace.program import Program
from whisperport.model.trace.trial import eager_outputs, random_inputs

from ...extent import core_or_all
from .conftest import EXACT, operators, random_tensor, reasons, rewritten
from .third_party import FusedAttention

# `fold-axes`: no tensor of more axes than there may be, the same numbers, and a reason where it cannot.


class Does(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Tensor:
        return self.function(*given)


def highest_rank(program: Program) -> int:
    values = [node.meta.get("val") for node in program.exported.graph.nodes]
    return max(value.dim() for value in values if isinstance(value, Tensor))


def same(before: Program, after: Program) -> bool:
    inputs = random_inputs(before, 0)
    pairs = zip(eager_outputs(before, inputs), eager_outputs(after, inputs), strict=True)
    return all(
        a.shape == b.shape and float((a - b).abs().max()) <= EXACT * max(1, float(b.abs().max()))
        for a, b in pairs
    )


@settings(max_examples=core_or_all(12, 100))
@given(
    sizes=st.lists(st.integers(1, 3), min_size=5, max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_any_order_of_axes_is_reached_by_permutations_of_four(sizes: list[int], order: Any) -> None:
    axes = list(range(len(sizes)))
    order.shuffle(axes)

    def permuted(x: Tensor) -> Tensor:
        return (x.reshape(sizes).permute(axes) * 2.0).flatten()

    before, after, outcome = rewritten("fold-axes", Does(permuted), random_tensor(math.prod(sizes)))

    assert highest_rank(after) <= 4
    assert not outcome.rejected
    assert same(before, after)


@pytest.mark.parametrize("batch", [1, 2])
def test_queries_keys_and_values_of_one_product(batch: int) -> None:
    before, after, _ = rewritten("fold-axes", FusedAttention(), random_tensor(batch, 11, 48))

    assert (highest_rank(before), highest_rank(after)) == (5, 4)
    assert "aten.scaled_dot_product_attention.default" in operators(after)
    assert same(before, after)


def grouped(q: Tensor, k: Tensor) -> Tensor:
    """Keys of 2 heads for 6 queries, as `repeat_kv` of transformers writes it."""
    batch, heads, rows, width = k.shape
    k = k[:, :, None].expand(batch, heads, 3, rows, width).reshape(batch, 3 * heads, rows, width)
    return q @ k.transpose(2, 3)


def windows(x: Tensor) -> Tensor:
    """Pieces of an image, as Swin cuts it; with most of what may be done to them."""
    y = x.reshape(1, 2, 2, 3, 2, 8).permute(0, 1, 3, 2, 4, 5)
    y = torch.softmax(nn.functional.layer_norm(y, (8,)), -1) + 1
    y = torch.cat([y, y.mean(2, keepdim=True)], 2) * torch.arange(8.0)
    y = torch.where(y > 1, nn.functional.gelu(y), 0.0).amax(2)
    return nn.functional.linear(y, torch.ones(3, 8)).reshape(1, -1, 3)


def batched(x: Tensor) -> Tensor:
    """Products that broadcast, and attention, with two axes of batch."""
    left = x.reshape(2, 3, 1, 4, 5)
    right = x.reshape(2, 3, 4, 5)[:, :, None].expand(2, 3, 6, 4, 5)
    scores = left @ right.transpose(-1, -2)
    attended = nn.functional.scaled_dot_product_attention(right, right, right)
    return torch.cat([scores.flatten(), attended.flatten()])


def in_pieces(x: Tensor) -> Tensor:
    y = x.reshape(2, 3, 2, 2, 5)
    pieces = [*y.unbind(2), *y.chunk(2, 1), *y.split(2, -1), *y.split([1, 4], -1), y[:, :, 1]]
    return torch.cat([piece.reshape(-1) for piece in pieces])


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (grouped, (random_tensor(1, 6, 5, 8), random_tensor(1, 2, 7, 8))),
        (grouped, (random_tensor(2, 6, 5, 8), random_tensor(2, 2, 7, 8))),
        (windows, (random_tensor(1, 4, 6, 8),)),
        (batched, (random_tensor(2, 3, 4, 5),)),
        (in_pieces, (random_tensor(6, 20),)),
    ],
)
def test_what_else_makes_axes(function: Any, inputs: tuple[Tensor, ...]) -> None:
    before, after, outcome = rewritten("fold-axes", Does(function), *inputs)

    assert highest_rank(before) > highest_rank(after) == 4
    assert not outcome.rejected
    assert same(before, after)


def test_the_number_sets_another_maximum_rank() -> None:
    module = Does(lambda x: x.reshape(2, 3, 2, 5).permute(0, 2, 1, 3).flatten())

    before, after, _ = rewritten("fold-axes=3", module, random_tensor(60))

    assert highest_rank(after) == 4  # an exchange in the middle takes four axes
    assert same(before, after)


def test_inputs_and_outputs_keep_their_axes_and_are_reported() -> None:
    module = Does(lambda x: torch.relu(x).permute(4, 3, 2, 1, 0))

    _, _, outcome = rewritten("fold-axes", module, random_tensor(2, 2, 2, 2, 3))

    assert "an input of rank 5; the limit is 4" in reasons(outcome)
    assert "an output of rank 5; the limit is 4" in reasons(outcome)


@pytest.mark.parametrize("dim", [None, []])
def test_a_sum_over_all_axes_is_declined(dim: Any) -> None:
    module = Does(lambda x: torch.sum(x.reshape(2, 2, 2, 2, 2), dim=dim))

    _, _, outcome = rewritten("fold-axes", module, random_tensor(32))

    assert "over all axes is not supported" in reasons(outcome)


def test_what_broadcasts_along_five_axes_is_declined() -> None:
    module = Does(lambda x, y: (x.reshape(2, 1, 2, 1, 2) + y.reshape(1, 2, 1, 2, 1)).flatten())

    _, _, outcome = rewritten("fold-axes", module, random_tensor(8), random_tensor(4))

    assert "needs 5 axes after folding; the limit is 4" in reasons(outcome)


def test_an_operator_that_is_not_known_is_declined_by_its_name() -> None:
    module = Does(lambda x: torch.roll(x.reshape(2, 2, 2, 2, 2), 1, 2).flatten())

    _, _, outcome = rewritten("fold-axes", module, random_tensor(32))

    assert "aten.roll.default is not supported" in reasons(outcome)


def test_tensors_of_four_axes_do_not_change() -> None:
    module = Does(lambda x: x.permute(0, 2, 1, 3).softmax(1))

    before, after, outcome = rewritten("fold-axes", module, random_tensor(2, 2, 2, 2))

    assert after is before
    assert not outcome.rejected


# What is computed ahead, and what must not be.

FOLD_CONSTANTS = "fold-constants"


class Positions(nn.Module):
    """A mask and rows of a table, both of static shape."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[1])
        mask = torch.where(rows[:, None] >= rows, 0.0, -1e4)
        return mask @ (x + self.table(rows))


def test_masks_and_positions_become_buffers(run: Any) -> None:
    before, after, outcome = rewritten(FOLD_CONSTANTS, Positions(), torch.zeros(1, 5, 8))

    assert len(outcome.changed) == 2
    assert operators(after) == ["aten.add.Tensor", "aten.matmul.default"]
    assert torch.equal(run(after)[0], run(before)[0])
    assert sum(t.numel() for t in after.exported.state_dict.values()) == 5 * 8 + 5 * 5


def test_a_transposed_weight_is_not_stored_twice() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(40, 8)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.table(tokens) @ self.table.weight.t()

    before, after, outcome = rewritten(FOLD_CONSTANTS, Tied(), torch.zeros(1, 5, dtype=torch.int64))

    assert after is before
    assert "transposed" in reasons(outcome)


def test_a_weight_in_another_shape_keeps_its_memory() -> None:
    class Raised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.weight[None, None]

    before, after, outcome = rewritten(FOLD_CONSTANTS, Raised(), torch.zeros(1, 2, 6, 4))
    (kept,), (weight,) = after.exported.state_dict.values(), before.exported.state_dict.values()

    assert len(outcome.changed) == 1
    assert kept.data_ptr() == weight.data_ptr()


def test_random_numbers_and_state_are_not_folded() -> None:
    class Alive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return x + torch.rand(3) + self.count * 2

    before, after, outcome = rewritten(FOLD_CONSTANTS, Alive(), torch.zeros(3))

    assert after is before
    assert outcome.changed == ()


def test_what_is_large_is_declined_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_constants, "MAX_BYTES", 99)

    _, _, outcome = rewritten(FOLD_CONSTANTS, Positions(), torch.zeros(1, 5, 8))

    assert "the constant has 100 bytes; the limit is 99, which this rewrite sets" in reasons(
        outcome
    )


# What is taken out, and what only looks as if it did nothing.

DROP_NO_OPS = "drop-no-ops"


class Idle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x.to(torch.float32), 0.5, training=False)
        return torch.relu((x * 1.0).reshape(2, 3).expand(2, 3) / 1)


def test_all_that_does_nothing_goes() -> None:
    _, after, outcome = rewritten(DROP_NO_OPS, Idle(), torch.zeros(2, 3))

    assert operators(after) == ["aten.relu.default"]
    assert outcome.rejected == ()


class Busy(nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        copied = x.to(torch.float32, copy=True)
        return copied.double() + (x * 2.0).reshape(3, 2).expand(4, 3, 2) + n / 1


def test_what_changes_type_shape_or_value_stays() -> None:
    before, after, outcome = rewritten(
        DROP_NO_OPS, Busy(), torch.zeros(2, 3)[0:2].reshape(3, 2), torch.ones(1, dtype=torch.int64)
    )

    kept = set(operators(before)) - {"aten._assert_tensor_metadata.default"}
    assert {"aten.mul.Tensor", "aten.div.Tensor", "aten.expand.default", "aten.to.dtype"} <= kept
    assert operators(after).count("aten.to.dtype") == operators(before).count("aten.to.dtype")
    assert outcome.rejected == ()


def test_a_dropout_for_training_is_declined() -> None:
    class Training(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5, training=True)

    before, after, outcome = rewritten(DROP_NO_OPS, Training(), torch.zeros(2, 3))

    assert after is before
    assert "exported for training" in outcome.rejected[0].reason


# Convolutions as Whisper has them, and others.

CONV1D_BY_CONV2D = "conv1d-by-conv2d"


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv1d(6, 4, 3, padding=1),
        nn.Conv1d(6, 4, 3, stride=2, padding=1, bias=False),
        nn.Conv1d(6, 4, 5, dilation=2, groups=2),
    ],
    ids=["first", "second", "grouped and dilated"],
)
def test_a_convolution_of_rank_3_is_one_of_rank_4(
    convolution: nn.Module, run: Any, largest_error: Any
) -> None:
    before, after, outcome = rewritten(CONV1D_BY_CONV2D, convolution, torch.zeros(2, 6, 20))

    assert len(outcome.changed) == 1
    assert "aten.conv1d.default" not in operators(after)
    assert largest_error(run(after), run(before)) <= EXACT


@pytest.mark.parametrize(
    ("convolution", "reason"),
    [
        (nn.Conv1d(6, 4, 3, padding="same"), "the padding is 'same'"),
        (nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Conv2d(6, 4, 1)), ""),
    ],
)
def test_others_are_left(convolution: nn.Module, reason: str) -> None:
    before, after, outcome = rewritten(CONV1D_BY_CONV2D, convolution, torch.zeros(2, 6, 20))

    assert after is before
    assert reason in reasons(outcome)
    assert bool(outcome.rejected) == bool(reason)
