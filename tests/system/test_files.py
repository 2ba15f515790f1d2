"""Files: written completely or not at all, read with one kind of error, never replaced by mistake."""

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz.system_calls import KILL, Fault, watched, why_not
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whisperport.apps.serving.keys import Keys
from whisperport.errors import UsageError, WhisperportError
from whisperport.system import regular_file
from whisperport.system.array_files import open_array
from whisperport.system.atomic import clear_temporaries, write_atomic
from whisperport.system.outputs import Kind, Output, check_outputs, write_page
from whisperport.system.page import html_page
from whisperport.system.regular_file import read_short_text

# A file is written completely or not at all.


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


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="files without a name need Linux")
def test_a_writer_that_is_killed_before_the_data_is_complete_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given
    path, seen = tmp_path / "out.bin", []
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", lambda _: seen.append(sorted(tmp_path.iterdir())))

    # when
    write_atomic(path, b"new")

    # then
    assert seen[0] == [path]
    assert path.read_bytes() == b"new"


def left_by_a_kill(path: Path) -> Path:
    """Kill a writer right before it renames its temporary file, and return that file."""
    if why := why_not():
        pytest.skip(why)
    path.write_bytes(b"old")
    calls = watched(lambda: write_atomic(path, b"new"), path.parent).calls
    path.write_bytes(b"old")
    (rename,) = (call for call in calls if call.kind == "rename")
    assert watched(lambda: write_atomic(path, b"new"), path.parent, Fault(rename, KILL)).met
    (left,) = set(path.parent.iterdir()) - {path}
    return left


def test_what_a_killed_writer_left_is_deleted_by_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "out.bin"
    assert left_by_a_kill(path).read_bytes() == b"new"
    assert path.read_bytes() == b"old"

    write_atomic(path, b"newer")

    assert path.read_bytes() == b"newer"
    assert list(tmp_path.iterdir()) == [path]


def test_the_temporary_file_of_a_writer_that_still_runs_is_not_deleted(tmp_path: Path) -> None:
    path = tmp_path / "out.bin"
    left = left_by_a_kill(path)

    with left.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        write_atomic(path, b"newer")

    assert path.read_bytes() == b"newer"
    assert left.read_bytes() == b"new"


def test_a_link_in_place_of_a_temporary_file_is_neither_followed_nor_deleted(
    tmp_path: Path,
) -> None:
    path, mine = tmp_path / "out.bin", tmp_path / "mine"
    left = left_by_a_kill(path)
    mine.write_text("mine")
    left.unlink()
    left.symlink_to(mine)

    write_atomic(path, b"newer")

    assert path.read_bytes() == b"newer"
    assert left.is_symlink()
    assert mine.read_text() == "mine"


def test_a_folder_that_cannot_be_flushed_is_a_warning_since_the_new_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)

    write_atomic(tmp_path / "out.bin", b"new")

    assert (tmp_path / "out.bin").read_bytes() == b"new"
    assert "may be lost in a power failure" in caplog.text


def test_a_disk_without_permissions_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.bin"
    path.write_bytes(b"old")

    def chmod(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", chmod)

    write_atomic(path, b"new")

    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("missing", ["open", "link"])
def test_where_no_file_can_be_without_a_name_it_has_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    # given
    work = getattr(os, missing)

    def fail(path: Path, flags: Any, *arguments: Any, **settings: Any) -> Any:
        if missing == "link" or flags != os.O_RDONLY:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return work(path, flags, *arguments, **settings)

    monkeypatch.setattr(os, missing, fail)

    # when
    write_atomic(tmp_path / "out.bin", b"new")

    # then
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"new"]


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


# Arrays from elsewhere: a file that is damaged, too short or no array is one kind of error.

NUMBERS = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.npy"
    np.save(path, NUMBERS)
    return path


@pytest.mark.parametrize("array", [NUMBERS, np.asfortranarray(NUMBERS), NUMBERS > 3], ids=str)
def test_an_array_comes_back(array: np.ndarray, file: Path) -> None:
    np.save(file, array)

    np.testing.assert_array_equal(open_array(file), array)


def test_a_file_that_states_more_than_it_holds_is_refused_without_memory(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data.replace(b"(3, 4)", b"(3" + b"0" * 15 + b",)")[: len(data)])

    with pytest.raises(ValueError, match="ValueError"):
        open_array(file)


def test_values_after_those_that_are_stated_are_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes() * 2)

    with pytest.raises(ValueError, match=r"176 bytes after the values"):
        open_array(file)


@pytest.mark.parametrize("what", ["objects", "text", "archive", "pipe", "folder", "nothing"])
def test_what_is_no_file_of_numbers_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    if what == "objects":
        np.save(path, np.array([{}]), allow_pickle=True)
    elif what == "text":
        np.save(path, np.array(["a"]))
    elif what == "archive":
        with path.open("wb") as out:
            np.savez(out, x=NUMBERS)
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()

    with pytest.raises(ValueError, match=r"."):
        open_array(path)


@given(place=st.integers(0, 127), byte=st.integers(0, 255))
def test_any_damaged_header_is_read_or_refused(
    place: int, byte: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.npy"
    np.save(path, NUMBERS)
    data = bytearray(path.read_bytes())
    data[place] = byte
    path.write_bytes(data)

    with suppress(ValueError):
        assert open_array(path).nbytes == NUMBERS.nbytes


# No output replaces an input, another output, or something that whisperport did not write.

FILES: tuple[Kind, ...] = ("page", "file", "transcript")
KINDS: tuple[Kind, ...] = (*FILES, "folder", "bundle")


def rejected(*wanted: Output, inputs: list[Path] | None = None) -> str:
    with pytest.raises(UsageError) as error:
        check_outputs(wanted, inputs or [])
    assert error.value.hint
    return error.value.why


def a_link(path: Path, to: Path) -> Path:
    path.symlink_to(to)
    return path


def a_hard_link(path: Path, to: Path) -> Path:
    os.link(to, path)
    return path


def another_spelling(path: Path, to: Path) -> Path:
    (to.parent / "folder").mkdir()
    return to.parent / "folder" / ".." / to.name


@pytest.mark.parametrize("alias", [a_link, a_hard_link, another_spelling])
@pytest.mark.parametrize("kind", FILES)
def test_an_input_is_no_output_under_any_name(
    kind: Kind, alias: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    program = tmp_path / "program.pt2"
    program.write_text(html_page("", ""))  # even if it is a page of whisperport

    found = rejected(Output(alias(tmp_path / "alias", program), "--out", kind), inputs=[program])

    assert found == f"it is the input `{program}`, which would be replaced"


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_exist_yet_may_be_written(kind: Kind, tmp_path: Path) -> None:
    check_outputs([Output(tmp_path / "new", "--out", kind)], [tmp_path / "other", tmp_path])


@pytest.mark.parametrize("kind", ["file", "transcript"])
def test_a_file_of_an_input_folder_is_not_replaced(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    manifest = tmp_path / "in" / "deep" / "manifest.json"
    manifest.touch()

    found = rejected(Output(manifest, "--out", kind), inputs=[tmp_path / "in"])

    assert found == f"it is a file of the input `{tmp_path / 'in'}`"


def test_a_folder_that_is_replaced_contains_no_input(tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    out.mkdir()
    link = a_link(tmp_path / "link.hef", out / "encoder.hef")
    (out / "encoder.hef").touch()

    for source in (out / "encoder.hef", link):
        assert "is in this folder" in rejected(Output(out, "--out", "bundle"), inputs=[source])
    check_outputs([Output(out, "--out", "folder")], [out / "encoder.hef"])


def test_a_page_replaces_only_a_page_of_whisperport(tmp_path: Path) -> None:
    mine, page = tmp_path / "report.html", tmp_path / "page.html"
    mine.write_text("<!doctype html><title>mine</title>")
    write_page(page, html_page("first", ""))

    why = rejected(Output(mine, "--html", "page"))
    write_page(page, html_page("second", ""))

    assert why == "a file that is not an HTML page of whisperport is there; it was not changed"
    assert "second" in page.read_text()
    with pytest.raises(UsageError, match="cannot write"):
        write_page(mine, html_page("", ""))
    assert "mine" in mine.read_text()


@pytest.mark.parametrize("kind", FILES)
def test_a_file_replaces_no_folder_and_no_pipe(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")

    assert rejected(Output(tmp_path / "folder", "--out", kind)) == "it is a folder"
    assert rejected(Output(tmp_path / "pipe", "--out", kind)) == "it is a pipe"
    assert rejected(Output(Path("/dev/null"), "--out", kind)) == "it is a device"


@pytest.mark.parametrize("kind", ["folder", "bundle"])
def test_a_folder_replaces_no_file(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert rejected(Output(tmp_path / "file", "--out", kind)) == "it is not a folder"


@pytest.mark.parametrize("kind", ["page", "file"])
def test_a_missing_folder_is_named_before_the_work(kind: Kind, tmp_path: Path) -> None:
    assert rejected(Output(tmp_path / "no" / "x", "--out", kind)) == "its folder does not exist"


@pytest.mark.parametrize("name", ["x\0y", "n" * 300, "loop"])
def test_a_path_that_cannot_be_is_an_error_with_its_reason(name: str, tmp_path: Path) -> None:
    a_link(tmp_path / "loop", tmp_path / "loop")

    for kind in FILES:
        assert rejected(Output(tmp_path / name, "--out", kind), inputs=[tmp_path, tmp_path / "a"])


def test_a_deleted_working_directory_is_an_error_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()

    for kind in FILES:
        with pytest.raises(FileNotFoundError):  # which the command line explains
            check_outputs([Output(Path("x"), "--out", kind)], [Path("input")])


def test_two_outputs_are_not_one_file(tmp_path: Path) -> None:
    a_link(tmp_path / "link", tmp_path / "x.html")
    page, out = Output(tmp_path / "link", "--html", "page"), tmp_path / "x.html"

    assert "is the same path" in rejected(page, Output(out, "--out", "file"))
    inside = Output(out / "page.html", "--html", "page")
    out.mkdir()
    assert "is in the other" in rejected(inside, Output(out, "--out", "bundle"))
    assert "is in the other" in rejected(Output(out, "--out", "bundle"), inside)
    check_outputs([inside, Output(out, "--out", "folder")])
    # nor is the user told to create a folder that the other one will be
    out.rmdir()
    assert "is in the other" in rejected(inside, Output(out, "--out", "bundle"))
    assert "is in the other" in rejected(Output(out, "--out", "bundle"), inside)


def test_letter_case_is_compared_as_the_file_system_does(tmp_path: Path) -> None:
    # given a folder with one file, on a file system that compares letter case
    lower, upper = (
        Output(tmp_path / name, "--out", "file") for name in ("straße.TXT", "STRASSE.txt")
    )
    (tmp_path / "Straße").touch()
    (tmp_path / "Song.wav").touch()
    # then two outputs in other letter case are two files
    check_outputs([lower, upper])
    # when the folder finds its file in other letter case, as the root of a USB stick does
    (tmp_path / "sONG.WAV").hardlink_to(tmp_path / "Song.wav")
    # then they are one file
    assert "is the same path" in rejected(lower, upper)


def test_a_text_may_come_from_a_pipe() -> None:
    reading, writing = os.pipe()
    os.write(writing, "Straße\n".encode())
    os.close(writing)

    assert read_short_text(f"/dev/fd/{reading}") == "Straße\n"


def test_a_device_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular_file, "MAX_TEXT_BYTES", 1000)

    for read in (read_short_text, Keys.load):
        with pytest.raises((OSError, UsageError), match="/dev/zero"):
            read(Path("/dev/zero"))
