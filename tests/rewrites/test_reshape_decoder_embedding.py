"""Where Hailo's graph is cut, and where it cannot be."""

from typing import Any

import torch
from torch import Tensor, nn

from .rewriting import operators, reasons, rewritten

NAME = "reshape-decoder-embedding"
TOKENS = torch.zeros(1, 5, dtype=torch.int64)


class Embedded(nn.Module):
    def __init__(self, *, positions: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 8)
        self.positions = nn.Parameter(torch.randn(5, 8)) if positions else None

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.table(tokens)
        return torch.relu(rows if self.positions is None else rows + self.positions)


def test_the_rows_pass_through_an_images_shape(run: Any) -> None:
    before, after, outcome = rewritten(NAME, Embedded(positions=True), TOKENS)
    shapes = [
        tuple(node.meta["val"].shape)
        for node in after.exported.graph.nodes
        if node.op == "call_function"
    ]

    assert len(outcome.changed) == 1
    assert (1, 8, 5, 1) in shapes
    assert operators(after)[2:6] == [
        "aten.unsqueeze.default",
        "aten.transpose.int",
        "aten.reshape.default",
        "aten.permute.default",
    ]
    assert torch.equal(run(after)[0], run(before)[0])


def test_without_positions_there_is_no_place_to_cut() -> None:
    before, after, outcome = rewritten(NAME, Embedded(positions=False), TOKENS)

    assert after is before
    assert "not added to positions" in reasons(outcome)
