"""What an archive reads and where it writes: manifests, and the output folder."""

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import whisperport
from whisperport.apps.archive import parquet_manifest
from whisperport.apps.archive.job import Job, with_state
from whisperport.apps.archive.manifest import read_source
from whisperport.apps.archive.output_folder import GENERATOR, check_folder
from whisperport.apps.archive.store import Store
from whisperport.apps.archive.subtitle_files import delete_subtitles, write_subtitles
from whisperport.errors import UsageError
from whisperport.system.child import Limits
from whisperport.system.page import html_page

from .test_store import IDENTITY, row

# An archive writes only into a folder of its own, and nothing of the user's is replaced.


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


# What is to be transcribed: folders, lists and manifests, also wrong and hostile ones.


def ids(source: Any) -> list[str]:
    return sorted(job.id for job in read_source(source))


def test_a_folder_has_its_audio_files_and_those_of_its_subfolders(tmp_path: Path) -> None:
    (tmp_path / "night").mkdir()
    for name in ("monday.MP3", "night/tuesday.wav", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "night/again").symlink_to(tmp_path)  # a loop of folders
    (tmp_path / "loop.wav").symlink_to(tmp_path / "loop.wav")

    assert ids(tmp_path) == ["loop.wav", "monday.MP3", "night/tuesday.wav"]


def test_a_name_that_is_not_utf8_has_an_id_that_is(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9.wav"
    with open(path, "wb") as file:
        file.write(b"x")

    (job,) = read_source(tmp_path)

    assert job.id == r"caf\udce9.wav"
    assert (os.fsencode(job.path), job.size) == (path, 1)


@pytest.mark.parametrize("seconds", [-(10**10), 10**10])
def test_a_time_beyond_64_bits_of_nanoseconds_is_the_nearest_that_a_row_holds(
    seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talk.wav").write_bytes(b"x")
    status = os.stat_result(os.stat(tmp_path / "talk.wav"), {"st_mtime_ns": seconds * 10**9})
    monkeypatch.setattr(os, "stat", lambda *_, **__: status)  # few file systems store such a time

    job = with_state(Job("talk", "talk.wav"))

    assert pa.scalar(job.modified_ns, pa.int64()).as_py() * seconds > 0


def test_the_longest_file_is_first(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(bytes(320_000))  # 10 s
    (tmp_path / "b.opus").write_bytes(bytes(80_000))  # 20 s
    stated = tmp_path / "list.jsonl"
    rows = [{"path": "a.wav"}, {"path": "b.opus"}, {"path": "c.wav", "duration": 3600}]
    stated.write_text("\n".join(map(json.dumps, rows)))

    assert [job.id for job in read_source(tmp_path)] == ["b.opus", "a.wav"]
    assert [job.id for job in read_source(stated)] == ["c.wav", "b.opus", "a.wav"]


ROWS = [
    {"id": "1", "path": "a.wav", "language": "de", "prompt": "Names: Ada.", "phrases": "Ada, Bo"}
    | {"duration": 2.5},
    {"id": "2", "path": "/b.wav", "language": None, "prompt": None, "phrases": None}
    | {"duration": None},
]


def as_parquet(path: Path) -> None:
    with path.open("wb") as file:
        parquet.write_table(pa.Table.from_pylist(ROWS), file)


def as_csv(path: Path) -> None:
    path.write_text(
        "id,path,language,prompt,phrases,duration\n"
        '1,a.wav,de,Names: Ada.,"Ada, Bo",2.5\n2,/b.wav,,,,\n'
    )


def as_json_lines(path: Path) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n\n" for row in ROWS))


@pytest.mark.parametrize("write", [as_parquet, as_csv, as_json_lines])
def test_every_form_of_a_manifest_gives_the_same_jobs(write: Any, tmp_path: Path) -> None:
    suffix = {as_parquet: "parquet", as_csv: "csv", as_json_lines: "jsonl"}[write]
    folder = tmp_path / os.fsdecode(b"not UTF-8 \xff")
    folder.mkdir()
    manifest = folder / f"list.{suffix}"
    write(manifest)

    two, one = sorted(read_source(manifest), key=lambda job: -int(job.id))

    assert (one.path, one.language, one.prompt) == (str(folder / "a.wav"), "de", "Names: Ada.")
    assert (one.phrases, one.duration_s) == ("Ada, Bo", 2.5)
    assert (two.path, two.language, two.prompt, two.phrases) == ("/b.wav", None, None, None)
    assert two.duration_s is None


def test_paths_and_a_list_of_paths_are_sources(tmp_path: Path) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text("a b.wav\n\n/c.wav\n")

    assert ids(listed) == ["/c.wav", "a b.wav"]
    assert ids([Path("a.wav"), "b.wav"]) == ["a.wav", "b.wav"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("list.csv", "id,path\n1,a.wav\n1,b.wav\n", "ids occur more than once, such as `1`"),
        ("list.csv", "id,file\n1,a.wav\n", "row 1 has no `path`; its columns: id, file"),
        ("list.csv", "id,path\n1,a.wav\n2,\n", "row 2 has no `path`"),
        ("list.csv", "path,duration\na.wav,long\n", "`duration` of row 1 is 'long'"),
        ("list.csv", "path,duration\na.wav,nan\n", "expected seconds"),
        ("list.csv", 'path\n"a.wav\n', "cannot read"),
        ("list.csv", "path\n" + "a" * 200_000, "field larger"),
        ("list.csv", "path\n" + "a" * 2**20, "1048576 characters or more"),
        ("list.jsonl", '{"path": "a.wav"}\n[1]\n', "expected an object with `path`"),
        ("list.jsonl", '{"path": ["a.wav"]}', "expected text"),
        ("list.jsonl", '{"path": "a.wav"', "cannot read"),
        ("list.jsonl", '{"path": "a.wav", "duration": 1' + "0" * 400 + "}", "expected seconds"),
        ("list.jsonl", "[" * 100_000, "cannot read"),
        ("list.jsonl", '"' + "a" * 2**20, "1048576 characters or more"),
        ("list.txt", "\n\n", "nothing to transcribe"),
        ("list.parquet", "not Parquet", "cannot read"),
        ("list.xml", "<a/>", "neither a folder nor"),
        ("list.json", "", "neither a folder nor"),
    ],
)
def test_a_wrong_manifest_is_an_error_that_says_where(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    manifest = tmp_path / name
    manifest.write_text(text)

    with pytest.raises(UsageError) as error:
        read_source(manifest)

    assert message in str(error.value)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"file": ["a.wav"]}, "no column `path`; its columns: file"),
        ({"path": [1]}, "`path` of row 1 is 1; expected text"),
        ({"path": ["a.wav"], "language": [b"de"]}, "`language` of row 1"),
    ],
)
def test_parquet_of_another_schema_is_an_error(
    columns: dict[str, Any], message: str, tmp_path: Path
) -> None:
    manifest = tmp_path / "list.parquet"
    parquet.write_table(pa.table(columns), manifest)

    with pytest.raises(UsageError) as error:
        read_source(manifest)

    assert message in str(error.value)


def test_bytes_that_are_not_utf8_and_a_pipe_are_errors(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_bytes(b"caf\xe9.wav\n")
    os.mkfifo(tmp_path / "list.csv")

    for name in ("list.txt", "list.csv", "missing.csv"):
        with pytest.raises(UsageError):
            read_source(tmp_path / name)


# Manifests in Parquet that would fill the memory or never end.


def one_text_in_millions_of_rows(path: Path) -> None:
    """A few KB: each row is the same word of a dictionary."""
    indices = pa.array(np.zeros(5_000_000, np.int32))
    words = pa.DictionaryArray.from_arrays(indices, ["a.wav"])
    parquet.write_table(pa.table({"path": words}), path, compression="zstd")


def a_text_of_many_megabytes(path: Path) -> None:
    """A few KB: a text of 50 MB, which compresses well."""
    parquet.write_table(pa.table({"path": ["a" * 50_000_000]}), path, compression="zstd")


def one_large_text_in_each_row(path: Path) -> None:
    """64 MB that 4096 rows of a batch share: 256 GB if each had its own."""
    words = pa.DictionaryArray.from_arrays(pa.array([0] * 4096, pa.int32()), ["a" * 2**26])
    parquet.write_table(pa.table({"path": words}), path, compression="zstd")


def many_columns(path: Path) -> None:
    table = pa.table({f"column {number}": ["x"] for number in range(5_000)})
    parquet.write_table(table, path)


def nested(path: Path) -> None:
    kind, value = pa.string(), "a.wav"
    for _ in range(30):
        kind, value = pa.list_(kind), [value]
    parquet.write_table(pa.table({"path": pa.array([value], kind)}), path)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (one_text_in_millions_of_rows, "more than 100,000 rows"),
        (a_text_of_many_megabytes, "characters"),
        (one_large_text_in_each_row, "cannot read"),
        (many_columns, "no column `path`"),
        (nested, "nested"),
    ],
)
def test_a_hostile_manifest_is_an_error_within_limited_memory_and_time(
    write: Callable[[Path], None], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_manifest, "MAX_ROWS", 100_000)
    monkeypatch.setattr(parquet_manifest, "LIMITS", Limits(2**30, 60))
    path = tmp_path / "list.parquet"
    write(path)
    assert path.stat().st_size < 2_000_000
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()

    with pytest.raises(UsageError) as error:
        read_source(path)

    assert says in str(error.value)
    assert time.monotonic() - started < 120
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB


def test_a_column_with_a_dictionary_is_read(tmp_path: Path) -> None:
    words = pa.array(["a.wav", "b.wav", "c.wav", "a.wav"]).dictionary_encode()
    path = tmp_path / "list.parquet"
    parquet.write_table(pa.table({"id": [1, 2, 3, 4], "path": words}), path)

    found = {job.id: Path(job.path).name for job in read_source(path)}

    assert found == {"1": "a.wav", "2": "b.wav", "3": "c.wav", "4": "a.wav"}
