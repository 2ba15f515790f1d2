"""What is computed ahead, and what must not be."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whisperport.model.rewrites import fold_constants

from .rewriting import operators, reasons, rewritten

NAME = "fold-constants"


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
    before, after, outcome = rewritten(NAME, Positions(), torch.zeros(1, 5, 8))

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

    before, after, outcome = rewritten(NAME, Tied(), torch.zeros(1, 5, dtype=torch.int64))

    assert after is before
    assert "transposed" in reasons(outcome)


def test_a_weight_in_another_shape_keeps_its_memory() -> None:
    class Raised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.weight[None, None]

    before, after, outcome = rewritten(NAME, Raised(), torch.zeros(1, 2, 6, 4))
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

    before, after, outcome = rewritten(NAME, Alive(), torch.zeros(3))

    assert after is before
    assert outcome.changed == ()


def test_what_is_large_is_declined_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_constants, "MAX_BYTES", 99)

    _, _, outcome = rewritten(NAME, Positions(), torch.zeros(1, 5, 8))

    assert "the constant has 100 bytes; the limit is 99, which this rewrite sets" in reasons(
        outcome
    )
