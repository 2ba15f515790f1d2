"""While programs are lowered, weights are neither copied with graphs nor kept in memory twice."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from whisperport.build.check import check
from whisperport.model.trace.program import trace
from whisperport.model.trace.shared_weights import shared_weights
from whisperport.targets import get_target
from whisperport.targets.cpu.xnnpack.lowering import SMALLEST, weights_on_disk


def test_a_copy_shares_its_weights_within_the_block_only() -> None:
    module = nn.Linear(3, 3)

    with shared_weights():
        inside = copy.deepcopy(module)
    outside = copy.deepcopy(module)

    assert inside is not module
    assert inside.weight is module.weight
    assert outside.weight is not module.weight
    assert torch.equal(outside.weight, module.weight)


def test_a_fake_tensor_is_copied_as_before() -> None:
    with FakeTensorMode():
        fake = torch.empty(3)

    with shared_weights():
        assert copy.deepcopy(fake) is not fake


def test_an_error_ends_the_block_too() -> None:
    before = torch.Tensor.__deepcopy__
    with pytest.raises(RuntimeError), shared_weights():
        raise RuntimeError

    assert torch.Tensor.__deepcopy__ is before


def test_equal_data_is_one_file_and_its_content_is_the_same(tmp_path: Path) -> None:
    from executorch.exir._serialize._named_data_store import NamedDataStore

    large, small = bytes(range(256)) * (SMALLEST // 256), b"small"
    with weights_on_disk(tmp_path):
        first, second = NamedDataStore(), NamedDataStore()
        for store in (first, second):
            store.add_named_data("a", large)
        first.add_named_data("b", small)
        (folder,) = tmp_path.iterdir()
        (file,) = folder.iterdir()
        assert file.read_bytes() == large
        assert first.buffers[0] is second.buffers[0]
        assert len(first.buffers[0]) == len(large)
        assert first.buffers[1] == small

    assert not list(tmp_path.iterdir())
    store = NamedDataStore()
    store.add_named_data("a", large)
    assert store.buffers == [large]


def test_the_files_are_deleted_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), weights_on_disk(tmp_path):
        raise RuntimeError

    assert not list(tmp_path.iterdir())


class Vision(nn.Module):
    """Operators that torch decomposes into others which XNNPACK computes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16)
        self.shuffle, self.unshuffle = nn.PixelShuffle(2), nn.PixelUnshuffle(2)
        self.alone = nn.BatchNorm2d(16)  # not behind a convolution

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.convolution(x))
        x = self.unshuffle(self.shuffle(x))
        return self.alone(nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear"))


def test_what_check_does_not_reject_is_delegated_and_the_method_is_forward(tmp_path: Path) -> None:
    program = trace("vision", Vision().eval(), (torch.rand(1, 3, 8, 8),), ["y"])
    target = get_target("xnnpack")

    entry, facts = target.lower_file(program, tmp_path / "vision.pte", lambda _: None)

    assert entry.method == "forward"
    assert facts["undelegated"] == []
    assert not check(program, "xnnpack").programs[0].rejected
