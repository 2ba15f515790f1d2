"""A file is replaced by its quantized form completely, or not at all."""

import stat
from pathlib import Path
from typing import Any

import pytest

from whisperport.errors import LoweringError, MissingPackageError
from whisperport.targets.quantizing import replace_by_quantized

NAMES = {"failure": "it could not quantize", "missing": "it is absent", "target": "t", "extra": "e"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "step.bin"
    path.write_bytes(b"float")
    path.chmod(0o640)
    return path


def test_the_file_is_replaced_and_keeps_its_mode(file: Path) -> None:
    def quantize(source: Path, made: Path) -> None:
        made.with_name("temporary").write_bytes(b"")
        made.write_bytes(source.read_bytes() + b" as integers")

    replace_by_quantized(file, quantize, **NAMES)

    assert file.read_bytes() == b"float as integers"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("error", "expected", "what", "why"),
    [
        (
            KeyError("x"),
            LoweringError,
            "it could not quantize step.bin for `t`",
            "KeyError: 'x'",
        ),
        (RuntimeError(), LoweringError, "for `t`", "RuntimeError: "),
        (RuntimeError("first\nsecond"), LoweringError, "for `t`", "RuntimeError: first"),
        (ImportError("no q"), MissingPackageError, "cannot quantize for `t`: it is absent", "no q"),
    ],
)
def test_after_an_error_the_file_is_unchanged(
    file: Path, error: Exception, expected: Any, what: str, why: str
) -> None:
    def quantize(source: Path, made: Path) -> None:
        made.write_bytes(b"half")
        raise error

    with pytest.raises(expected) as raised:
        replace_by_quantized(file, quantize, **NAMES)

    assert what in raised.value.what
    assert raised.value.why == why
    assert raised.value.hint
    assert file.read_bytes() == b"float"
    assert list(file.parent.iterdir()) == [file]


def test_a_quantizer_that_writes_nothing_is_an_error(file: Path) -> None:
    with pytest.raises(LoweringError):
        replace_by_quantized(file, lambda source, made: None, **NAMES)

    assert file.read_bytes() == b"float"
