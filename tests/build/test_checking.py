"""`check` from Python: a live module, and what torch.export returned."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whisperport
from whisperport.build.check import Checked
from whisperport.errors import LoweringError, UsageError
from whisperport.model.trace.program import trace


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout, self.table = nn.LayerNorm(8), nn.Dropout(), nn.Embedding(50, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return {"logits": self.dropout(self.norm(x)) @ self.table.weight.t() * scale}


X = torch.zeros(1, 4, 8)


def rejected(checked: Checked) -> list[tuple[str, str, str]]:
    (program,) = checked.programs
    return [(g.rule, g.operator, g.occurrences[0].module) for g in program.rejected]


@pytest.mark.parametrize("args", [(X,), [X], {"x": X}, {"x": X, "scale": 2.0}])
def test_a_module_is_checked_without_a_file(args: Any) -> None:
    checked = whisperport.check(Head(), args, "xnnpack")

    assert not checked
    assert checked.programs[0].graph.name == "Head"
    assert rejected(checked) == [("WP301", "matmul", ""), ("WP101", "layer_norm", "norm")]
    source = checked.programs[0].rejected[0].occurrences[0].source
    assert source is not None
    assert source.file == __file__


def test_a_module_keeps_its_mode() -> None:
    module = Head().train()
    module.norm.eval()

    whisperport.check(module, (X,), "onnxruntime")

    assert [one.training for one in module.modules()] == [True, False, True, True]


def test_an_exported_program_and_a_program_are_checked_as_the_module_is() -> None:
    class Plain(Head):
        def forward(self, x: Tensor, scale: float = 1.0) -> Any:
            return super().forward(x, scale)["logits"]

    expected = rejected(whisperport.check(Plain(), (X,), "xnnpack"))
    exported = torch.export.export(Plain().eval(), (X,), strict=False)

    assert rejected(whisperport.check(exported, "xnnpack")) == expected
    assert rejected(whisperport.check(exported, target="xnnpack")) == expected
    assert rejected(whisperport.check(trace("plain", Plain(), (X,)), "xnnpack")) == expected


@pytest.mark.parametrize("args", ["xnnpack", X])
def test_a_module_needs_its_arguments(args: Any) -> None:
    with pytest.raises(UsageError, match="cannot check the module `Head`") as error:
        whisperport.check(Head(), args, "xnnpack")

    assert "(x,)" in error.value.hint


def test_a_module_that_torch_cannot_export_is_an_error() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if bool(x.sum() > 0) else x

    with pytest.raises(LoweringError, match="could not trace `Branches`"):
        whisperport.check(Branches(), (X,), "xnnpack")


def test_importing_the_package_and_its_check_needs_no_torch() -> None:
    code = "import sys, whisperport; whisperport.check; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"
