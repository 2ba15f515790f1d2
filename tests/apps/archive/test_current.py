"""Which rows are about the files that have their ids now: moved, changed, missing and other files."""

import errno
import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from whisperport.apps.archive.current import Comparison, compared
from whisperport.apps.archive.identity import options_sha256
from whisperport.apps.archive.manifest import read_source
from whisperport.apps.archive.store import Finished
from whisperport.errors import UsageError
from whisperport.transcription import TranscribeOptions

OPTIONS = TranscribeOptions()
NOON = 1_700_000_000_000_000_000


def a_file(path: Path, text: bytes = b"speech", modified_ns: int = NOON) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    os.utime(path, ns=(modified_ns, modified_ns))
    return path


def rows_of(source: Path) -> dict[str, Finished]:
    """The rows that a run over this source would have written."""
    return {
        job.id: Finished(
            path=job.path,
            part=Path("part"),
            size=job.size,
            modified_ns=job.modified_ns,
            failed=job.size < 0,
            audio_sha256=None if job.size < 0 else sha256(job.path),
            options_sha256=options_sha256(OPTIONS),
        )
        for job in read_source(source)
    }


def sha256(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def compare(source: Path, rows: dict[str, Finished], *, retry_failed: bool = False) -> Comparison:
    return compared(read_source(source), rows, OPTIONS, retry_failed=retry_failed)


def test_two_folders_with_equal_names_are_an_error_that_names_both_paths(tmp_path: Path) -> None:
    monday = a_file(tmp_path / "monday/talk.wav", b"Monday")
    tuesday = a_file(tmp_path / "tuesday/talk.wav", b"Tuesday")

    with pytest.raises(UsageError) as error:
        compare(tuesday.parent, rows_of(monday.parent))

    assert str(monday) in error.value.what
    assert str(tuesday) in error.value.what


def test_equal_size_and_time_hide_no_other_file(tmp_path: Path) -> None:
    a_file(tmp_path / "monday/talk.wav", b"12345678")
    a_file(tmp_path / "tuesday/talk.wav", b"abcdefgh")

    with pytest.raises(UsageError, match=r"talk\.wav"):
        compare(tmp_path / "tuesday", rows_of(tmp_path / "monday"))


def test_a_relative_path_is_that_of_the_folder_where_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("monday", "tuesday"):
        a_file(tmp_path / name / "talks/talk.wav", name[:3].encode())
    monkeypatch.chdir(tmp_path / "monday")
    rows = rows_of(Path("talks"))

    assert rows["talk.wav"].path == str(tmp_path / "monday/talks/talk.wav")
    monkeypatch.chdir(tmp_path / "tuesday")
    with pytest.raises(UsageError, match=r"talk\.wav"):
        compare(Path("talks"), rows)


def moved(source: Path) -> Path:
    return source.rename(source.with_name("moved"))


def copied(source: Path) -> Path:
    a_file(source.with_name("copy") / "talk.wav", modified_ns=NOON + 1)
    return source.with_name("copy")


def linked(source: Path) -> Path:
    source.with_name("link").symlink_to(source)
    return source.with_name("link")


def touched(source: Path) -> Path:
    os.utime(source / "talk.wav")
    return source


@pytest.mark.parametrize("change", [moved, copied, linked, touched])
def test_the_same_content_is_the_same_file_and_its_row_gets_the_new_path(
    change: Callable[[Path], Path], tmp_path: Path
) -> None:
    a_file(tmp_path / "talks/talk.wav")
    rows = rows_of(tmp_path / "talks")

    source = change(tmp_path / "talks")
    found = compare(source, rows)

    assert (found.waiting, found.old) == ([], {})
    (job,) = read_source(source)
    assert found.seen == {
        "talk.wav": {"path": job.path, "size": job.size, "modified_ns": job.modified_ns}
    }


def test_nothing_is_read_if_path_size_and_time_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_file(tmp_path / "talks/talk.wav")
    rows = rows_of(tmp_path / "talks")
    monkeypatch.setattr("whisperport.apps.archive.current.file_sha256", pytest.fail)

    assert compare(tmp_path / "talks", rows) == Comparison([], {}, {})


@pytest.mark.parametrize("text", [b"longer than before", b"SPEECH"])
def test_a_file_that_has_changed_is_transcribed_again(text: bytes, tmp_path: Path) -> None:
    path = a_file(tmp_path / "talks/talk.wav")
    rows = rows_of(tmp_path / "talks")

    a_file(path, text, NOON + 1)
    found = compare(tmp_path / "talks", rows)

    assert [job.id for job in found.waiting] == ["talk.wav"]
    assert found.old == rows


def unmounted(path: Path) -> None:
    path.unlink()


def unreadable(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("change", [unmounted, unreadable, a_pipe])
@pytest.mark.parametrize("retry_failed", [False, True])
def test_a_row_outlives_its_file(
    change: Callable[[Path], None], retry_failed: bool, tmp_path: Path
) -> None:
    path, manifest = a_file(tmp_path / "talk.wav"), tmp_path / "list.txt"
    manifest.write_text("talk.wav\n")
    rows = rows_of(manifest)
    rows = {id: replace(one, failed=retry_failed) for id, one in rows.items()}

    change(path)
    found = compare(manifest, rows, retry_failed=retry_failed)

    assert found == Comparison([], {}, {})


def test_a_row_outlives_a_file_that_cannot_be_read_to_its_end_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    path = a_file(tmp_path / "talks/talk.wav")
    rows = rows_of(tmp_path / "talks")
    a_file(path, modified_ns=NOON + 1)
    monkeypatch.setattr("whisperport.apps.archive.current.file_sha256", broken)

    assert compare(tmp_path / "talks", rows) == Comparison([], {}, {})


def test_a_file_that_was_missing_is_transcribed_when_it_is_there(tmp_path: Path) -> None:
    manifest = tmp_path / "list.jsonl"
    manifest.write_text('{"id": "1", "path": "wrong/talk.wav"}')
    rows = rows_of(manifest)
    assert compare(manifest, rows) == Comparison([], {}, {})

    a_file(tmp_path / "right/talk.wav")
    manifest.write_text('{"id": "1", "path": "right/talk.wav"}')

    assert [job.id for job in compare(manifest, rows).waiting] == ["1"]


def test_a_failed_file_may_be_replaced_by_another_if_failed_ones_are_tried_again(
    tmp_path: Path,
) -> None:
    manifest = tmp_path / "list.jsonl"
    a_file(tmp_path / "damaged.mp3", b"noise")
    a_file(tmp_path / "whole.wav", b"speech")
    manifest.write_text('{"id": "1", "path": "damaged.mp3"}')
    rows = {id: replace(one, failed=True) for id, one in rows_of(manifest).items()}
    manifest.write_text('{"id": "1", "path": "whole.wav"}')

    with pytest.raises(UsageError, match=r"whole\.wav"):
        compare(manifest, rows)
    assert [one.id for one in compare(manifest, rows, retry_failed=True).waiting] == ["1"]


def test_a_new_file_and_another_language_are_transcribed(tmp_path: Path) -> None:
    for name in ("a.wav", "b.wav"):
        a_file(tmp_path / name)
    manifest = tmp_path / "list.jsonl"
    manifest.write_text('{"path": "a.wav"}')
    rows = rows_of(manifest)

    manifest.write_text('{"path": "a.wav", "language": "de"}\n{"path": "b.wav"}')

    found = compare(manifest, rows)
    assert {job.id for job in found.waiting} == {"a.wav", "b.wav"}
    assert set(found.old) == {"a.wav"}
