"""Third-party programs that need more memory than the machine has: every verb reports an error."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from whisperport.build.fix import fix
from whisperport.build.lower import LowerOptions, lower
from whisperport.errors import ProgramError
from whisperport.system.child import memory_within

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")

MB = 10**6


class Large(nn.Module):
    """Fills 80 GB of constants, of which a file holds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.full((20 * 10**9,), 1.0).sum()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pt2") / "large.pt2"
    torch.export.save(torch.export.export(Large(), (torch.ones(2),), strict=False), path)
    return path


def test_a_constant_of_80_gb_is_not_fixed(large: Path) -> None:
    with pytest.raises(ProgramError, match=r"(?s)torch cannot run the program `large`.*--trust"):
        fix(large, "xnnpack")


def test_a_constant_of_80_gb_is_not_lowered(large: Path, tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="torch cannot run the program `large`"):
        lower(large, "onnxruntime", tmp_path / "large.onnx", LowerOptions(preflight=False))

    assert not list(tmp_path.iterdir())


def test_memory_is_limited_within_the_block_only() -> None:
    with memory_within(300 * MB):
        assert len(bytearray(100 * MB)) == 100 * MB
        with pytest.raises(MemoryError):
            bytearray(500 * MB)

    assert len(bytearray(500 * MB)) == 500 * MB


def test_a_limit_is_lowered_by_another_and_never_raised() -> None:
    with memory_within(300 * MB), memory_within(3000 * MB), pytest.raises(MemoryError):
        bytearray(500 * MB)
