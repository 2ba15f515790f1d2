"""The delegation of a .pte is read; other files are rejected."""

import random

import pytest

from whisperport.errors import BundleError
from whisperport.program.bundle import Bundle
from whisperport.targets.cpu.xnnpack.lowering import Delegation, read_delegation

NOISE = random.Random(0).randbytes(10_000)


def test_every_method_of_a_bundle_is_read(exported: object) -> None:
    bundle: Bundle = exported("xnnpack")  # type: ignore[operator]
    file = bundle.folder / bundle.manifest.programs[0].files[0]

    found = read_delegation(file.read_bytes())

    assert set(found) == {entry.method for entry in bundle.manifest.programs}
    for entry in bundle.manifest.programs:
        assert entry.facts.delegated > 0
        assert found[entry.method] == Delegation(entry.method, 1, ())


@pytest.mark.parametrize(
    "data",
    [b"", b"ET12", b"\0" * 100, NOISE, b"no program " * 99, b"\0\0\0\0ET12" + b"\xff" * 99],
    ids=["empty", "short", "zeros", "noise", "text", "right identifier"],
)
def test_what_is_no_program_is_rejected(data: bytes) -> None:
    with pytest.raises(BundleError, match="not an ExecuTorch program"):
        read_delegation(data)
