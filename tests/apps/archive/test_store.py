"""The rows on disk: complete parts, what was finished, and disks that are full or not writable."""

import math
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

import whisperport.apps.archive.store
from whisperport.apps.archive.identity import Identity
from whisperport.apps.archive.job import Job
from whisperport.apps.archive.rows import CODES, Row, row_of, with_identity
from whisperport.apps.archive.store import MERGING, REPLACES, Store, schema
from whisperport.errors import (
    AudioError,
    IncompleteError,
    NumericalError,
    UsageError,
    WhisperportError,
)
from whisperport.speech.text import Segment
from whisperport.speech.text.segment import Word
from whisperport.system.atomic import write_atomic
from whisperport.transcription import Transcript

IDENTITY = Identity("tiny", "b" * 64, "0" * 64, {"whisperport": "1"})
WORDS = (Word(" Hello", 0.1, 0.5, 0.9), Word(" there.", 0.5, 1.0, 1 / 3))
SEGMENT = Segment(0.0, 1.0, " Hello there.", (50364, 2425, 456), -0.1, 0.02, 0.0, 0.9, 0, WORDS)
SPOKEN = Transcript("Hello there.", (SEGMENT,), "en", 1.0, (), 0.75)


def row(id: str, error: Exception | None = None) -> Row:
    job = Job(id, f"/{id}.wav", size=10, modified_ns=5)
    found = None if error else SPOKEN
    made = row_of(job, transcript=found, error=error, audio_sha256="a" * 64, seconds=0.25)
    return with_identity(made, IDENTITY, IDENTITY.options_sha256)


def store(folder: Path, save_every_s: float = 3600) -> Store:
    return Store(folder, IDENTITY, save_every_s)


def test_a_row_is_read_as_it_was_written(tmp_path: Path) -> None:
    failed = row("two", AudioError("`/two.wav` is empty", why="it has 0 bytes", code="empty"))
    before = store(tmp_path, 0)
    for one in (row("one"), failed):
        before.add(one)

    found = {one["id"]: one for one in store(tmp_path).rows()}

    assert found["one"]["segments"][0]["words"][1] == {
        "word": " there.",
        "start": 0.5,
        "end": 1.0,
        "probability": 1 / 3,
    }
    assert found["one"]["avg_logprob"] == pytest.approx(-0.1)
    assert dict(found["one"]["versions"]) == {"whisperport": "1"}
    assert found["two"]["error"] == {
        "code": "empty",
        "what": "the file is empty",
        "why": "it has 0 bytes",
        "hint": "",
    }
    assert (found["one"]["model"], found["one"]["language_probability"]) == ("tiny", 0.75)
    assert abs(datetime.now(UTC) - found["one"]["transcribed_at"]) < timedelta(minutes=1)
    assert (found["two"]["text"], found["two"]["duration"], found["two"]["segments"]) == (
        None,
        None,
        [],
    )


def test_rows_are_saved_together_and_finished_when_they_are(tmp_path: Path) -> None:
    before = store(tmp_path)
    for number in range(3):
        before.add(row(str(number)))
    assert not store(tmp_path).finished()

    before.save()

    assert set(store(tmp_path).finished()) == {"0", "1", "2"}
    assert len(list((tmp_path / "parts").iterdir())) == 1


def test_rows_are_deleted_and_changed_without_the_others_of_their_part(tmp_path: Path) -> None:
    before = store(tmp_path)
    for number in range(3):
        before.add(row(str(number)))
    before.save()
    finished = before.finished()

    before.change({"1": finished["1"]}, {"2": {"path": "/moved.wav"}})
    assert {id: one.path for id, one in before.finished().items()} == {
        "0": "/0.wav",
        "2": "/moved.wav",
    }
    before.change({one: finished[one] for one in "02"}, {})

    assert not list((tmp_path / "parts").iterdir())


def test_an_interrupt_after_a_write_saves_no_row_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a signal that arrives when a part is on disk, before its rows count as saved
    def write_and_interrupt(path: Path, data: bytes) -> None:
        write_atomic(path, data)
        raise KeyboardInterrupt

    before = store(tmp_path)
    before.add(row("one"))
    module = "whisperport.apps.archive.store.write_atomic"
    with monkeypatch.context() as patched:
        patched.setattr(module, write_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            before.save()
    # when rows are saved because of the end, and after it
    before.save()
    before.add(row("two"))
    before.save()
    # then each is there once
    assert [len(ids(tmp_path / "parts" / name)) for name in parts(tmp_path)] == [1, 1]
    assert set(store(tmp_path).finished()) == {"one", "two"}


def test_the_name_of_the_folder_need_not_be_utf8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"out\xff")

    with_parts(folder, 2).merge()

    assert set(store(folder).finished()) == {"0", "1"}


def test_what_a_killed_writer_left_is_deleted(tmp_path: Path) -> None:
    store(tmp_path)
    left = tmp_path / "parts/.x.parquet.0123456789ab.tmp"
    left.write_bytes(b"half")

    assert not store(tmp_path).finished()
    assert not left.exists()


@pytest.mark.parametrize("field", ["bundle_sha256", "options_sha256"])
def test_rows_of_another_bundle_or_other_options_are_never_mixed(
    field: str, tmp_path: Path
) -> None:
    store(tmp_path)

    with pytest.raises(UsageError, match="rows of"):
        Store(tmp_path, replace(IDENTITY, **{field: "c" * 64}), 1)


@pytest.mark.parametrize(
    "damage",
    [
        "cut",
        "other schema",
        "link",
        "pipe",
        "record",
        "copy",
        "another bundle",
        "[",
        "null",
        pytest.param("[" * 5000, id="deep"),
    ],
)
def test_damage_is_an_error_that_names_the_file(damage: str, tmp_path: Path) -> None:
    before = store(tmp_path, 0)
    before.add(row("one"))
    (part,) = (tmp_path / "parts").iterdir()
    if damage == "cut":
        part.write_bytes(part.read_bytes()[:-20])
    elif damage == "link":
        part.rename(tmp_path / "elsewhere")
        part.symlink_to(tmp_path / "elsewhere")
    elif damage == "pipe":  # opening one waits without an end
        part.unlink()
        os.mkfifo(part)
    elif damage == "copy":  # every row of it is there twice
        part = part.with_name("z.parquet")
        part.write_bytes(next((tmp_path / "parts").iterdir()).read_bytes())
    elif damage == "another bundle":  # a part of another archive
        foreign = [row("two") | {"bundle_sha256": "c" * 64}]
        parquet.write_table(pa.Table.from_pylist(foreign, schema()), part)
    elif damage.startswith(("[", "null")):  # what a merged part replaces
        table = parquet.read_table(part).replace_schema_metadata({REPLACES: damage.encode()})
        parquet.write_table(table, part.with_name(MERGING))
    elif damage == "other schema":
        parquet.write_table(pa.table({"id": ["one"]}), part)
    else:
        part = tmp_path / "archive.json"
        part.write_text("{")

    with pytest.raises(WhisperportError, match=tmp_path.name) as error:
        store(tmp_path).finished()

    assert error.value.hint


def test_a_part_that_cannot_be_read_just_now_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    before = with_parts(tmp_path, 1)
    monkeypatch.setattr(Path, "open", fail)

    with pytest.raises(WhisperportError, match=r"cannot read .*\.parquet") as error:
        before.finished()

    assert error.value.why == "Permission denied"
    assert "move" not in error.value.hint


def test_a_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "out").touch()

    with pytest.raises(WhisperportError, match="cannot write to"):
        store(tmp_path / "out")


FULL = """
import resource, signal, sys
from pathlib import Path
from tests.apps.archive.test_store import row, store
from whisperport.errors import WhisperportError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
one = store(Path(sys.argv[1]))
one.add(row("kept")); one.save()
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
for number in range(2000):
    one.add(row(f"{number}" * 20) | {"text": str(hash((number, 1)))})
"""


def test_a_full_disk_is_an_error_and_keeps_the_finished_rows(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), *sys.path]),
    }

    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, env=environment
    )

    assert "WhisperportError: cannot write" in done.stderr
    assert "File too large" in done.stderr
    assert set(store(tmp_path).finished()) == {"kept"}
    assert len(list((tmp_path / "parts").iterdir())) == 1


def parts(folder: Path) -> list[str]:
    """The parts that a reader of Parquet sees."""
    return sorted(path.name for path in (folder / "parts").glob("*.parquet"))


def with_parts(folder: Path, count: int) -> Store:
    """A folder with a row in each part."""
    before = store(folder)
    for number in range(count):
        before.add(row(str(number)))
        before.save()
    return before


def test_merged_parts_have_the_same_rows(tmp_path: Path) -> None:
    before = with_parts(tmp_path, 5)
    rows = sorted(before.rows(), key=lambda one: one["id"])
    assert len(parts(tmp_path)) == 5

    before.merge()
    before.merge()

    assert sorted(before.rows(), key=lambda one: one["id"]) == rows
    assert len(parts(tmp_path)) == 1
    assert len(list((tmp_path / "parts").iterdir())) == 1


def test_nothing_is_written_through_a_link_that_appears_during_a_run(tmp_path: Path) -> None:
    # given links to a file and to a folder of the user, which were not there when the run began
    before = with_parts(tmp_path, 2)
    mine, elsewhere = tmp_path / "mine", tmp_path / "elsewhere"
    mine.write_text("mine")
    (tmp_path / "parts" / MERGING).symlink_to(mine)
    # then the file is not replaced by a merged part
    with pytest.raises(WhisperportError, match=MERGING):
        before.merge()
    assert mine.read_text() == "mine"
    # and no part is written into the folder
    (tmp_path / "parts").rename(tmp_path / "moved")
    elsewhere.mkdir()
    (tmp_path / "parts").symlink_to(elsewhere)
    before.add(row("2"))
    with pytest.raises(WhisperportError, match="parts` is a link"):
        before.save()
    assert not list(elsewhere.iterdir())


def test_a_merged_part_has_a_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = with_parts(tmp_path, 7)
    size = max(path.stat().st_size for path in (tmp_path / "parts").iterdir())
    monkeypatch.setattr("whisperport.apps.archive.store.MERGED_BYTES", 3.5 * size)

    before.merge()

    assert len(parts(tmp_path)) == 3
    assert set(before.finished()) == set("0123456")


class Killed(BaseException):
    """The process ends."""


@pytest.mark.parametrize("step", range(9))
def test_an_end_at_any_step_of_a_merge_loses_no_row_and_doubles_none(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, left = with_parts(tmp_path, 4), [step]

    def ending(action: Any) -> Any:
        def run(*arguments: Any) -> Any:
            if not left[0]:
                raise Killed
            left[0] -= 1
            return action(*arguments)

        return run

    with monkeypatch.context() as patched, suppress(Killed):
        for owner, name in ((Path, "unlink"), (Path, "rename")):
            patched.setattr(owner, name, ending(getattr(owner, name)))
        for name in ("write_atomic", "flush_folder"):
            patched.setattr(
                f"whisperport.apps.archive.store.{name}",
                ending(getattr(whisperport.apps.archive.store, name)),
            )
        before.merge()
    seen = [one for name in parts(tmp_path) for one in ids(tmp_path / "parts" / name)]
    assert len(seen) == len(set(seen)), "a reader sees a row twice"

    after = store(tmp_path)

    assert sorted(one["id"] for one in after.rows()) == ["0", "1", "2", "3"]
    assert {path.suffix for path in (tmp_path / "parts").iterdir()} == {".parquet"}


def ids(part: Path) -> list[str]:
    return [str(one) for one in parquet.read_table(part)["id"].to_pylist()]


def test_every_code_in_the_source_has_a_meaning() -> None:
    package = Path(whisperport.__file__).parent
    folders = (package / "speech" / "audio", package / "apps" / "archive")
    sources = [path.read_text() for folder in folders for path in folder.glob("*.py")]
    found = {one for text in sources for one in re.findall(r'code="([a-z-]+)"', text)}

    assert found <= set(CODES)
    assert len(found) >= 9


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AudioError("`/a.wav` is empty", code="empty"), "empty"),
        (AudioError("it is odd"), "audio"),
        (UsageError("no such language"), "options"),
        (NumericalError("a NaN", "encoder"), "model"),
        (IncompleteError("stopped at 3 s", SPOKEN, why="`/a.wav` is damaged"), "incomplete"),
        (PermissionError(13, "Permission denied", "/a.wav"), "unreadable"),
        (MemoryError(), "memory"),
        (ZeroDivisionError("division by zero in /a.wav"), "unexpected"),
    ],
)
def test_an_error_has_a_code_and_no_path(error: Exception, code: str) -> None:
    found = row_of(Job("a", "/a.wav"), error=error)["error"]

    assert found["code"] == code
    assert "/a.wav" not in " ".join(found.values())


def test_the_confidence_is_the_mean_probability_of_the_tokens() -> None:
    segments = (
        replace(SEGMENT, avg_logprob=-0.2, tokens=(1, 2, 3)),
        replace(SEGMENT, avg_logprob=-1.0, tokens=(1,)),
    )
    spoken = row_of(Job("a", "/a"), transcript=replace(SPOKEN, segments=segments))
    silent = row_of(Job("a", "/a"), transcript=replace(SPOKEN, segments=()))

    assert spoken["confidence"] == pytest.approx(math.exp(-0.4))
    assert silent["confidence"] is None


def test_the_reference_page_has_every_code_with_its_meaning() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/archive-format.md").read_text()

    for code, meaning in CODES.items():
        assert f"| `{code}` | {meaning} |" in page
