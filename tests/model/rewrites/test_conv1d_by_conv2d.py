"""Convolutions as Whisper has them, and others."""

from typing import Any

import pytest
import torch
from torch import nn

from .rewriting import EXACT, operators, reasons, rewritten

NAME = "conv1d-by-conv2d"


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
    before, after, outcome = rewritten(NAME, convolution, torch.zeros(2, 6, 20))

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
    before, after, outcome = rewritten(NAME, convolution, torch.zeros(2, 6, 20))

    assert after is before
    assert reason in reasons(outcome)
    assert bool(outcome.rejected) == bool(reason)
