"""What is taken out, and what only looks as if it did nothing."""

import torch
from torch import Tensor, nn

from .rewriting import operators, rewritten

NAME = "drop-no-ops"


class Idle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x.to(torch.float32), 0.5, training=False)
        return torch.relu((x * 1.0).reshape(2, 3).expand(2, 3) / 1)


def test_all_that_does_nothing_goes() -> None:
    _, after, outcome = rewritten(NAME, Idle(), torch.zeros(2, 3))

    assert operators(after) == ["aten.relu.default"]
    assert outcome.rejected == ()


class Busy(nn.Module):
    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        copied = x.to(torch.float32, copy=True)
        return copied.double() + (x * 2.0).reshape(3, 2).expand(4, 3, 2) + n / 1


def test_what_changes_type_shape_or_value_stays() -> None:
    before, after, outcome = rewritten(
        NAME, Busy(), torch.zeros(2, 3)[0:2].reshape(3, 2), torch.ones(1, dtype=torch.int64)
    )

    kept = set(operators(before)) - {"aten._assert_tensor_metadata.default"}
    assert {"aten.mul.Tensor", "aten.div.Tensor", "aten.expand.default", "aten.to.dtype"} <= kept
    assert operators(after).count("aten.to.dtype") == operators(before).count("aten.to.dtype")
    assert outcome.rejected == ()


def test_a_dropout_for_training_is_declined() -> None:
    class Training(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5, training=True)

    before, after, outcome = rewritten(NAME, Training(), torch.zeros(2, 3))

    assert after is before
    assert "exported for training" in outcome.rejected[0].reason
