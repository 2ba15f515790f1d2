"""`check --target litert` predicts what LiteRT's interpreter really gives to XNNPACK."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import whisperport
from whisperport.model.trace.program import trace
from whisperport.targets.cpu.litert.target import xnnpack_delegation
from whisperport.targets.tflite.lowering import lower_to_tflite


class Masked(nn.Module):
    """A mask of constants, which the converter stores as a SELECT_V2 of constants."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(8, 8, dtype=torch.bool).tril()
        return torch.softmax(x + torch.where(mask, 0.0, -1e4), -1)


class ComputedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.layer(x)[0])


class EverySecond(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)[:, :, ::2] * 2.0


class PaddedBy(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (1, 1), value=self.value) * 2.0


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(torch.relu(x) + 1.0)


@pytest.mark.parametrize(
    ("module", "undelegated"),
    [
        (Masked(), ["SELECT_V2"]),
        (ComputedWeight(), ["FULLY_CONNECTED"]),
        (EverySecond(), ["STRIDED_SLICE"]),
        (PaddedBy(0.0), []),
        (PaddedBy(-5.0), ["PADV2"]),
        (Logarithm(), []),
    ],
    ids=lambda one: type(one).__name__,
)
def test_predictions_are_what_the_interpreter_does(
    module: nn.Module, undelegated: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "program.tflite"
    program = trace("program", module, (torch.zeros(1, 8, 8),))
    lower_to_tflite([program], path, lambda _: None, target="litert", extra="litert-export")

    (checked,) = whisperport.check(path, target="litert").programs

    real = xnnpack_delegation(path, "program")
    assert real["undelegated"] == undelegated
    names = {found.name for group in checked.rejected for found in group.occurrences}
    assert [n.original_op for n in checked.graph.nodes if n.name in names] == undelegated
    assert checked.predicted is not None
    assert len(checked.predicted.subgraphs) == real["subgraphs"]
