"""The rows on disk: complete parts, what was finished, and disks that are full or not writable."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from whisperport.archive.identity import Identity
from whisperport.archive.job import Job
from whisperport.archive.rows import Row, row_of, with_identity
from whisperport.archive.store import Store
from whisperport.errors import AudioError, UsageError, WhisperportError
from whisperport.text import Segment
from whisperport.text.segment import Word
from whisperport.transcription import Transcript

IDENTITY = Identity("b" * 64, "0" * 64, {"whisperport": "1"})
WORDS = (Word(" Hello", 0.1, 0.5, 0.9), Word(" there.", 0.5, 1.0, 1 / 3))
SEGMENT = Segment(0.0, 1.0, " Hello there.", (50364, 2425, 456), -0.1, 0.02, 0.0, 0.9, 0, WORDS)
SPOKEN = Transcript("Hello there.", (SEGMENT,), "en", 1.0, ())


def row(id: str, error: Exception | None = None) -> Row:
    job = Job(id, f"/{id}.wav", size=10, modified_ns=5)
    found = None if error else SPOKEN
    made = row_of(job, transcript=found, error=error, audio_sha256="a" * 64, seconds=0.25)
    return with_identity(made, IDENTITY, IDENTITY.options_sha256)


def store(folder: Path, save_every_s: float = 3600) -> Store:
    return Store(folder, IDENTITY, save_every_s)


def test_a_row_is_read_as_it_was_written(tmp_path: Path) -> None:
    failed = row("two", AudioError("it is empty", why="it has 0 bytes"))
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
        "kind": "AudioError",
        "what": "it is empty",
        "why": "it has 0 bytes",
        "hint": "",
    }
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


@pytest.mark.parametrize("damage", ["cut", "other schema", "record"])
def test_damage_is_an_error_that_names_the_file(damage: str, tmp_path: Path) -> None:
    before = store(tmp_path, 0)
    before.add(row("one"))
    (part,) = (tmp_path / "parts").iterdir()
    if damage == "cut":
        part.write_bytes(part.read_bytes()[:-20])
    elif damage == "other schema":
        parquet.write_table(pa.table({"id": ["one"]}), part)
    else:
        part = tmp_path / "archive.json"
        part.write_text("{")

    with pytest.raises(WhisperportError, match=tmp_path.name) as error:
        store(tmp_path).finished()

    assert error.value.hint


def test_a_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "out").touch()

    with pytest.raises(WhisperportError, match="cannot write to"):
        store(tmp_path / "out")


FULL = """
import resource, signal, sys
from pathlib import Path
from tests.archive.test_store import row, store
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
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
    }

    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, env=environment
    )

    assert "WhisperportError: cannot write" in done.stderr
    assert "File too large" in done.stderr
    assert set(store(tmp_path).finished()) == {"kept"}
    assert len(list((tmp_path / "parts").iterdir())) == 1
