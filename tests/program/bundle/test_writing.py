import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.errors import BundleError
from whisperport.program.bundle import MANIFEST, TOKENIZER, Bundle
from whisperport.program.bundle.writing import check_writable, writing_bundle
from whisperport.system import atomic

from .conftest import program_of

Fill = Callable[..., None]
Write = Callable[..., Bundle]


def test_a_bundle_replaces_another_and_leaves_nothing_beside_it(
    tmp_path: Path, write: Write
) -> None:
    write(tmp_path / "nano", b"old")

    written = write(tmp_path / "nano", b"new")

    assert program_of(tmp_path / "nano") == b"new"
    assert Bundle.open(tmp_path / "nano") == written
    assert os.listdir(tmp_path) == ["nano"]


def test_missing_parents_are_made(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "a" / "b" / "nano")

    assert program_of(tmp_path / "a" / "b" / "nano") == b"program"


def test_an_empty_folder_is_used_and_a_link_is_followed(tmp_path: Path, write: Write) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")

    write(tmp_path / "link")

    assert (tmp_path / "link").is_symlink()
    assert program_of(tmp_path / "real") == b"program"


def test_a_bundle_that_a_link_leads_to_is_not_replaced(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "v1")
    (tmp_path / "current").symlink_to("v1")
    before = (tmp_path / "v1" / MANIFEST).stat()

    with pytest.raises(BundleError, match="cannot write a bundle to") as caught:
        write(tmp_path / "current")

    assert "it is a link to" in caught.value.why
    assert (tmp_path / "v1" / MANIFEST).stat().st_ino == before.st_ino
    assert (tmp_path / "current").is_symlink()


def test_others_may_read_a_bundle_as_they_may_any_new_folder(tmp_path: Path, write: Write) -> None:
    (tmp_path / "plain").mkdir()

    write(tmp_path / "nano")

    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "nano")]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("stop", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_while_writing_leaves_the_old_bundle(
    tmp_path: Path, write: Write, stop: type[BaseException]
) -> None:
    write(tmp_path / "nano", b"old")

    def then(folder: Path) -> None:
        raise stop

    with pytest.raises(stop):
        write(tmp_path / "nano", b"new", then)

    assert program_of(tmp_path / "nano") == b"old"
    assert os.listdir(tmp_path) == ["nano"]


def test_ending_without_commit_is_an_error(tmp_path: Path, fill: Fill) -> None:
    with (
        pytest.raises(RuntimeError, match="commit"),
        writing_bundle(tmp_path / "nano") as writer,
    ):
        fill(writer.folder)

    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("missing", [TOKENIZER, "programs/encoder.bin"])
def test_an_incomplete_bundle_is_not_written(tmp_path: Path, write: Write, missing: str) -> None:
    write(tmp_path / "nano", b"old")

    with pytest.raises(BundleError, match=missing):
        write(tmp_path / "nano", b"new", lambda folder: (folder / missing).unlink())

    assert program_of(tmp_path / "nano") == b"old"


@pytest.mark.parametrize("name", ["back\\slash", "a:b", "line\nbreak"])
def test_a_name_that_could_not_be_read_back_is_not_written(
    tmp_path: Path, write: Write, name: str
) -> None:
    with pytest.raises(BundleError, match="not allowed"):
        write(tmp_path / "nano", b"new", lambda folder: (folder / name).write_text(""))

    assert os.listdir(tmp_path) == []


def test_a_link_is_not_written(tmp_path: Path, write: Write) -> None:
    with pytest.raises(BundleError, match="regular"):
        write(tmp_path / "nano", b"new", lambda folder: (folder / "x").symlink_to(tmp_path))

    assert os.listdir(tmp_path) == []


INTERRUPTIBLE = [
    (os, "mkdir"),
    (os, "rename"),
    (os, "open"),
    (os, "fsync"),
    (os, "rmdir"),
    (os, "unlink"),
    (hashlib, "sha256"),
    (Path, "write_bytes"),
    (os, "listdir"),
    (os, "scandir"),
    (fcntl, "flock"),
    (atomic, "_renameat2"),
    (shutil, "rmtree"),
    (np, "save"),
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), INTERRUPTIBLE, ids=lambda value: str(value)[-12:])
def test_ctrl_c_at_any_call_leaves_one_whole_bundle(
    tmp_path: Path,
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    owner: Any,
    name: str,
    after: bool,
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # slow, and nothing is unplugged here
    real = getattr(owner, name)
    interrupted, nth = True, 0

    while interrupted:
        nth += 1
        calls = 0
        interrupted = False

        def call(*args: Any, nth: int = nth, **kwargs: Any) -> Any:
            nonlocal calls, interrupted
            calls += 1
            if calls != nth:
                return real(*args, **kwargs)
            interrupted = True
            if after:
                real(*args, **kwargs)
            raise KeyboardInterrupt

        out = tmp_path / str(nth) / "nano"
        write(out, b"old")
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, call)
            try:
                write(out, b"new")
                completed = True
            except KeyboardInterrupt:
                completed = False

        assert program_of(out) in ([b"new"] if completed else [b"old", b"new"])
        assert os.listdir(out.parent) == ["nano"]

    assert nth > 1


def test_only_leftovers_of_this_name_are_removed(
    tmp_path: Path, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    left = [
        tmp_path / ".nano.partial-0123456789abcdef",
        tmp_path / ".nano.discarded-0123456789abcdef",
        tmp_path / ".nano.whisperport-lock",
    ]
    kept = [
        tmp_path / ".other.partial-0123456789abcdef",
        tmp_path / ".nano.partial-4711-0123abcd",
        tmp_path / ".nano.partial-notours",
        tmp_path / ".nano.backup-0123456789abcdef",
    ]
    left[0].mkdir()
    (left[0] / "half").write_text("text")
    left[1].mkdir()
    left[2].touch()
    for folder in kept:
        folder.mkdir()
        (folder / "file").write_text("text")

    write(tmp_path / "nano")

    assert not any(map(os.path.lexists, left))
    assert all((folder / "file").exists() for folder in kept)
    assert str(tmp_path / "nano") in caplog.text


@pytest.mark.parametrize("kind", ["partial", "discarded", "replaced"])
def test_a_link_with_the_name_of_a_leftover_is_left_alone(
    tmp_path: Path, write: Write, kind: str
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("mine")
    link = tmp_path / f".nano.{kind}-0123456789abcdef"
    link.symlink_to(tmp_path / "thesis")

    write(tmp_path / "nano")

    assert link.is_symlink()
    assert (tmp_path / "thesis" / "thesis.tex").read_text() == "mine"


def test_a_bundle_that_a_kill_left_aside_is_put_back(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "nano", b"old")
    (tmp_path / "nano").rename(tmp_path / ".nano.replaced-0123456789abcdef")

    with pytest.raises(ValueError, match="stop"), writing_bundle(tmp_path / "nano"):
        raise ValueError("stop")

    assert program_of(tmp_path / "nano") == b"old"
    assert os.listdir(tmp_path) == ["nano"]


def test_a_bundle_that_was_put_back_is_not_overwritten_unless_that_was_asked_for(
    tmp_path: Path, write: Write
) -> None:
    write(tmp_path / "nano", b"old")
    (tmp_path / "nano").rename(tmp_path / ".nano.replaced-0123456789abcdef")

    with (
        pytest.raises(BundleError, match="exists"),
        writing_bundle(tmp_path / "nano", overwrite=False),
    ):
        pytest.fail("work was begun")

    assert program_of(tmp_path / "nano") == b"old"


@pytest.mark.parametrize("gone", [[TOKENIZER], [TOKENIZER, "programs/encoder.bin", "programs"]])
def test_half_a_bundle_that_was_being_deleted_is_not_put_back(
    tmp_path: Path, write: Write, gone: list[str]
) -> None:
    discarded = tmp_path / ".nano.discarded-0123456789abcdef"
    write(tmp_path / "nano", b"old")
    (tmp_path / "nano").rename(discarded)
    for relative in gone:
        path = discarded / relative
        path.rmdir() if path.is_dir() else path.unlink()

    with pytest.raises(ValueError, match="stop"), writing_bundle(tmp_path / "nano"):
        raise ValueError("stop")

    assert os.listdir(tmp_path) == []


def test_if_the_folder_cannot_be_renamed_both_bundles_are_kept(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "nano", b"old")
    real = atomic._renameat2

    def renameat2(source: Path, destination: Path, flags: int) -> bool:
        if flags == atomic.RENAME_EXCHANGE:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return real(source, destination, flags)

    monkeypatch.setattr(atomic, "_renameat2", renameat2)
    with pytest.raises(BundleError, match="was not moved to") as caught:
        write(tmp_path / "nano", b"new")

    assert "cross-device" in caught.value.why
    assert program_of(tmp_path / "nano") == b"old"
    assert program_of(tmp_path / "nano.new") == b"new"
    assert sorted(os.listdir(tmp_path)) == ["nano", "nano.new"]


def test_a_disk_that_cannot_flush_the_rename_is_warned_of(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flush(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(atomic, "flush_folder", flush)
    write(tmp_path / "nano", b"new")

    assert program_of(tmp_path / "nano") == b"new"
    assert "power failure" in caplog.text


def test_an_empty_folder_of_a_target_is_not_written(tmp_path: Path, write: Write) -> None:
    """An empty folder would look like a folder of the user when the bundle is replaced."""
    write(tmp_path / "nano", b"old", lambda folder: (folder / "a" / "b").mkdir(parents=True))

    write(tmp_path / "nano", b"new")

    assert program_of(tmp_path / "nano") == b"new"


def test_a_full_disk_is_said_to_be_full_and_the_old_bundle_stays(
    tmp_path: Path, write: Write
) -> None:
    write(tmp_path / "nano", b"old")

    def then(folder: Path) -> None:
        with open("/dev/full", "wb", buffering=0) as full:  # the kernel's own ENOSPC
            full.write(b"x")

    with pytest.raises(BundleError, match="full") as caught:
        write(tmp_path / "nano", bytes(3_000_000), then)

    assert "3 MB were written" in caught.value.why
    assert "free some space" in caught.value.hint
    assert program_of(tmp_path / "nano") == b"old"
    assert os.listdir(tmp_path) == ["nano"]


def test_a_disk_that_fills_up_while_committing_is_said_to_be_full(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "nano", b"old")

    def fsync(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(BundleError, match="full"):
            write(tmp_path / "nano", b"new")

    assert program_of(tmp_path / "nano") == b"old"
    assert os.listdir(tmp_path) == ["nano"]


def test_a_short_write_without_an_errno_is_blamed_on_a_disk_that_is_full(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def then(folder: Path) -> None:
        nothing_left = shutil.disk_usage(folder)._replace(free=0)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: nothing_left)
        raise OSError("1024 requested and 0 written")  # as numpy says it

    with pytest.raises(BundleError, match="full"):
        write(tmp_path / "nano", b"new", then)


def test_a_file_that_a_library_could_not_write_is_no_defect_of_whisperport(tmp_path: Path) -> None:
    # given a library that deletes the file for which there was no room, and an error of another kind
    def fail(message: str) -> None:
        with writing_bundle(tmp_path / "bundle") as writer:
            (writer.folder / "encoder.bin").write_bytes(bytes(2_000_000))
            raise RuntimeError(message)

    # then the error says what was written and how much is free
    with pytest.raises(BundleError, match="was not written") as caught:
        fail("basic_ios::clear: iostream error")
    assert re.search("iostream error; 2 MB were written, and [0-9]+ MB are free", caught.value.why)
    # and the other one stays
    with pytest.raises(RuntimeError, match="no such layer"):
        fail("no such layer")


def test_another_error_of_the_system_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), writing_bundle(tmp_path / "nano"):
        raise FileNotFoundError(errno.ENOENT, "no such checkpoint")


def test_too_little_space_is_known_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BundleError, match="not enough free disk space") as caught:
        check_writable(tmp_path / "nano", needed_bytes=2**62)

    assert "MB are needed" in caught.value.why

    # A part of a megabyte is no reason that says "0 MB are needed; 0 MB are free".
    nearly_full = shutil.disk_usage(tmp_path)._replace(free=300_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: nearly_full)
    with pytest.raises(BundleError, match="not enough free disk space") as caught:
        check_writable(tmp_path / "nano", needed_bytes=400_000)

    assert caught.value.why == "1 MB are needed; 0 MB are free"
    assert "a bundle" not in caught.value.what


@pytest.mark.parametrize(
    "path", ["file", "file/nano", "file/a/nano", "nul\0", "x" * 300, "/proc/nano"]
)
def test_a_path_that_cannot_be_written_is_known_beforehand(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("text")

    for write in (check_writable, lambda out: writing_bundle(out).__enter__()):
        with pytest.raises(BundleError, match="cannot write"):
            write(tmp_path / path)

    assert (tmp_path / "file").read_text() == "text"
    assert os.listdir(tmp_path) == ["file"]


def test_a_read_only_disk_is_known_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so the system's error is simulated."""

    def mkdir(path: Any, mode: int = 0o777) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(os, "mkdir", mkdir)

    with pytest.raises(BundleError, match="cannot write") as caught:
        check_writable(tmp_path / "nano")

    assert "Read-only" in caught.value.why


def test_the_root_of_a_disk_is_refused_with_a_folder_inside_it() -> None:
    with pytest.raises(BundleError, match="cannot write") as caught:
        check_writable(Path("/"))

    assert "inside" in caught.value.hint


def test_asking_beforehand_leaves_nothing_behind(tmp_path: Path) -> None:
    resolved = check_writable(tmp_path / "a" / "nano")

    assert resolved == tmp_path.resolve() / "a" / "nano"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "manifest_json",
    [
        None,
        "not json",
        "[]",
        "{}",
        '{"format": "another", "files": {"chapter.tex": {}}}',
        '{"format": "whisperport bundle"}',
    ],
)
def test_a_folder_of_something_else_is_never_replaced(
    tmp_path: Path, manifest_json: str | None
) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.tex").write_text("years of work")
    if manifest_json is not None:
        (folder / MANIFEST).write_text(manifest_json)

    with pytest.raises(BundleError, match="not a bundle"), writing_bundle(folder):
        pytest.fail("work was begun")

    assert (folder / "chapter.tex").read_text() == "years of work"


def test_a_damaged_bundle_may_be_replaced(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "nano")
    (tmp_path / "nano" / TOKENIZER).write_bytes(b"damaged")
    manifest = (tmp_path / "nano" / MANIFEST).read_text()
    (tmp_path / "nano" / MANIFEST).write_text(manifest.replace("nano", "mano", 1))

    write(tmp_path / "nano", b"new")

    assert program_of(tmp_path / "nano") == b"new"
