"""A file is written completely or not at all."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whisperport.errors import WhisperportError
from whisperport.system.atomic import clear_temporaries, write_atomic


@given(data=st.binary(max_size=200))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_reads_back_and_nothing_else_is_left(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "out.bin"

    write_atomic(path, data)

    assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_a_failure_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, failure: BaseException
) -> None:
    path = tmp_path / "out.bin"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(os, step, fail)
    with pytest.raises((WhisperportError, KeyboardInterrupt)) as caught:
        write_atomic(path, b"new")

    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    if isinstance(caught.value, WhisperportError):
        assert "No space left" in caught.value.why
        assert "old file is unchanged" in caught.value.hint


def test_a_replaced_file_keeps_its_permissions_and_a_new_one_follows_the_umask(
    tmp_path: Path,
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"")
    old.chmod(0o640)
    before = os.umask(0o027)
    try:
        write_atomic(new, b"")
        write_atomic(old, b"x")
    finally:
        os.umask(before)

    assert old.stat().st_mode & 0o777 == 0o640
    assert new.stat().st_mode & 0o777 == 0o640


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "real", tmp_path / "link"
    link.symlink_to(target)

    write_atomic(link, b"x")

    assert link.is_symlink()
    assert target.read_bytes() == b"x"


def test_a_very_long_name_still_fits_its_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)

    write_atomic(path, b"x")

    assert path.read_bytes() == b"x"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/out.bin", "create the folder first"),
        ("", "folder or a device"),
        ("a\0b", "null "),
        ("n" * 256, "too long"),
    ],
)
def test_a_path_that_cannot_be_written_is_rejected(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(WhisperportError) as caught:
        write_atomic(f"{tmp_path}/{name}", b"x")

    assert reason in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_temporary_files_of_killed_writers_are_cleared_and_only_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: None)  # as if it was killed before
        write_atomic(tmp_path / ("n" * 100), b"x")
        write_atomic(tmp_path / "a.json", b"x")
    kept = ["b.tmp", ".b.tmp", ".b.0123456789abcdef.tmp", ".b.0123456789ab.tmp.txt"]
    for name in kept:
        (tmp_path / name).touch()
    (tmp_path / ".folder.0123456789ab.tmp").mkdir()
    (tmp_path / ".link.0123456789ab.tmp").symlink_to(tmp_path / "b.tmp")

    clear_temporaries(tmp_path)

    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([*kept, ".folder.0123456789ab.tmp", ".link.0123456789ab.tmp"])
