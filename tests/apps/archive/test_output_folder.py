"""An archive writes only into a folder of its own, and nothing of the user's is replaced."""

import json
import os
from pathlib import Path

import pytest

import whisperport
from whisperport.apps.archive.output_folder import GENERATOR, check_folder
from whisperport.apps.archive.store import Store
from whisperport.apps.archive.subtitle_files import delete_subtitles, write_subtitles
from whisperport.errors import UsageError
from whisperport.system.page import html_page

from .test_store import IDENTITY, row


def an_archive(folder: Path) -> Path:
    store = Store(folder, IDENTITY, 0)
    store.add(row("one"))
    return folder


def refused(out: Path, source: Path | None = None) -> str:
    """Transcribe with a bundle that does not exist: a refusal comes before anything is opened."""
    with pytest.raises(UsageError) as error:
        whisperport.transcribe_archive(
            source or out.parent / "source", out, out.parent / "no bundle"
        )
    return str(error.value)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "name",
    ["report.html", "summary.json", "REPORT.HTML", "notes.txt", ".hidden", "parts/mine.parquet"],
)
def test_a_folder_that_is_no_archive_is_refused_and_what_is_in_the_way_named(
    name: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    before = contents(out)

    says = refused(out)

    assert name.split("/")[0] in says
    assert contents(out) == before


def test_the_folder_of_the_audio_is_refused_and_one_inside_of_it_is_right(tmp_path: Path) -> None:
    (tmp_path / "talk.wav").write_bytes(b"x")

    assert "talk.wav" in refused(tmp_path, tmp_path)
    check_folder(tmp_path / "rows")


def test_a_folder_that_is_missing_or_empty_or_an_archive_is_right(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()  # killed before its first file
    (tmp_path / "begun/.archive.json.whisperport-lock").touch()
    (tmp_path / "begun/.archive.json.0123456789ab.tmp").touch()
    (tmp_path / "link").symlink_to(an_archive(tmp_path / "archive"))

    for name in ("missing/below", "empty", "begun", "archive", "link"):
        check_folder(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("report.html", "<!doctype html><title>mine</title>"),
        ("summary.json", '{"files": 3}'),
        ("summary.json", "[" * 100_000),
    ],
)
def test_a_file_that_the_user_put_into_an_archive_is_not_replaced(
    name: str, text: str, tmp_path: Path
) -> None:
    out = an_archive(tmp_path / "out")
    (out / name).write_text(text)

    assert name in refused(out)
    assert (out / name).read_text() == text


def test_files_of_an_earlier_run_are_replaced(tmp_path: Path) -> None:
    out = an_archive(tmp_path / "out")
    (out / "report.html").write_text(html_page("Archive", ""))
    (out / "summary.json").write_text(json.dumps({"generator": GENERATOR}))
    (out / "subtitles").mkdir()
    (out / "my notes.txt").write_text("in nobody's way")

    check_folder(out)


@pytest.mark.parametrize(
    "name", ["report.html", "summary.json", "archive.json", "parts", "subtitles"]
)
@pytest.mark.parametrize("kind", ["link", "dangling link", "other kind"])
def test_a_link_or_another_kind_of_file_in_the_way_is_refused(
    name: str, kind: str, tmp_path: Path
) -> None:
    out, elsewhere = an_archive(tmp_path / "out"), tmp_path / "elsewhere"
    path = out / name
    if path.exists():
        path.rename(elsewhere)
    elif name == "subtitles":
        elsewhere.mkdir()
    else:
        elsewhere.write_text(html_page("Archive", ""))
    if kind == "other kind":
        os.mkfifo(path)
    else:
        path.symlink_to(elsewhere if kind == "link" else tmp_path / "nothing")
    before = contents(tmp_path) if kind == "link" else {}

    assert name in refused(out)
    assert not before or contents(tmp_path) == before


@pytest.mark.parametrize("text", ["{", "[]", '{"name": "mine"}', "", "x" * 10**6])
def test_a_record_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "archive.json").write_text(text)

    assert "archive.json" in refused(tmp_path)


def test_a_record_of_an_earlier_version_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "archive.json").write_text('{"bundle_sha256": "b", "options_sha256": "0"}')

    assert "earlier version" in refused(tmp_path)


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()

    assert "it is a file" in refused(tmp_path / "out")


def test_a_subtitle_file_that_the_user_edited_is_kept(tmp_path: Path) -> None:
    rows = [row("edited"), row("deleted"), row("as it was")]
    assert write_subtitles(rows, tmp_path, "srt") == []
    edited, deleted, _ = (
        next((tmp_path / "subtitles").glob(f"{one['id'].replace(' ', '_')}.*")) for one in rows
    )
    edited.write_text("my words")
    deleted.unlink()

    assert write_subtitles(rows, tmp_path, "srt") == [edited]
    delete_subtitles(rows, tmp_path)

    assert [path.read_text() for path in (tmp_path / "subtitles").iterdir()] == ["my words"]


def test_an_input_in_the_folder_that_is_written_is_refused(tmp_path: Path) -> None:
    an_archive(tmp_path / "rows")
    part = next((tmp_path / "rows" / "parts").glob("*.parquet"))
    before = contents(tmp_path)

    assert "is in the folder" in refused(tmp_path / "rows", part)

    assert contents(tmp_path) == before
