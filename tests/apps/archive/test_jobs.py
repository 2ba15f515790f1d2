"""How an archive's jobs are handed out, what its report says, and which rows are about files of today."""

import errno
import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whisperport.apps.archive.current import Comparison, compared
from whisperport.apps.archive.dispatch import Done, Ended, Event, Ready, dispatch
from whisperport.apps.archive.identity import Identity, options_sha256
from whisperport.apps.archive.job import Job
from whisperport.apps.archive.manifest import read_source
from whisperport.apps.archive.report import audio_link, report
from whisperport.apps.archive.rows import marks, row_of
from whisperport.apps.archive.store import Finished
from whisperport.apps.archive.subtitle_files import subtitle_name
from whisperport.apps.archive.summary import ArchiveSummary, summarize
from whisperport.errors import AudioError, UsageError, WhisperportError
from whisperport.runtime import Thresholds
from whisperport.speech.text import Match, Segment
from whisperport.transcription import TranscribeOptions, Transcript

# Which worker gets which file, and what the end of a worker costs.

JOBS = [Job(str(number), f"{number}.wav") for number in range(40)]


class Crew:
    """Workers in this process. `ends` says whether a worker ends when it begins a file."""

    def __init__(
        self,
        ends: Callable[[Job], bool] = lambda _: False,
        *,
        suspicious: bool = True,
        starts: bool = True,
    ) -> None:
        self.ends, self.suspicious, self.starts = ends, suspicious, starts
        self.running: dict[int, deque[Job]] = {}
        self.most: dict[int, int] = {}  # worker -> most files at a time
        self.n_started = 0
        self.waiting: deque[Event] = deque()

    def grow(self) -> None:
        for _ in range(2 - len(self.running)):
            self.n_started += 1
            self.running[self.n_started] = deque()
            self.waiting.append(
                Ready(self.n_started, 4) if self.starts else self._gone(self.n_started)
            )

    def give(self, worker: Hashable, job: Job) -> None:
        assert isinstance(worker, int)
        self.running[worker].append(job)
        self.most[worker] = max(self.most.get(worker, 0), len(self.running[worker]))

    def events(self) -> Iterable[Event]:
        if not self.waiting:
            for worker, jobs in list(self.running.items()):
                if jobs and self.ends(jobs[0]):
                    self.waiting.append(self._gone(worker))
                elif jobs:
                    self.waiting.append(Done(worker, row_of(jobs.popleft())))
        while self.waiting:
            yield self.waiting.popleft()

    def close(self) -> None: ...

    def _gone(self, worker: int) -> Ended:
        del self.running[worker]
        return Ended(worker, "it was killed", self.suspicious)


def test_every_file_has_one_row_and_the_first_is_begun_first() -> None:
    crew = Crew()

    rows = list(dispatch(JOBS, crew))

    assert sorted(int(row["id"]) for row in rows) == list(range(40))
    assert [row["id"] for row in rows[:2]] == ["0", "1"]
    assert crew.most == {1: 4, 2: 4}


def test_a_file_that_ends_its_worker_twice_is_a_row_and_costs_no_other_file() -> None:
    rows = list(dispatch(JOBS, Crew(lambda job: job.id in ("3", "17"))))

    failed = {row["id"]: row["error"] for row in rows if row["error"]}
    assert len(rows) == len({row["id"] for row in rows}) == 40
    assert set(failed) == {"3", "17"}
    assert failed["3"]["what"] == "the process that transcribed the file ended twice"
    assert failed["3"]["why"] == "it was killed"


def test_a_worker_that_ends_once_for_another_reason_costs_nothing() -> None:
    moments = iter([False, True] * 10)

    rows = list(dispatch(JOBS, Crew(lambda _: next(moments, False), suspicious=False)))

    assert next(moments, None) is None
    assert len(rows) == len({row["id"] for row in rows}) == 40
    assert not any(row["error"] for row in rows)


def test_workers_that_never_start_are_an_error() -> None:
    with pytest.raises(WhisperportError, match="no worker can be started") as error:
        list(dispatch(JOBS, Crew(starts=False)))

    assert error.value.why == "it was killed"


def test_without_files_no_worker_is_started() -> None:
    crew = Crew()

    assert not list(dispatch([], crew))
    assert crew.n_started == 0


# The report: its numbers, and text that tries to leave its place.

ATTACK = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>"


def transcript(text: str, **values: Any) -> Transcript:
    segment = Segment(0.0, 2.0, text, (1, 2), **{"avg_logprob": -0.5, **values})
    return Transcript(text, (segment,) if text else (), "en", 1800.0, ())


def rows() -> list[dict[str, Any]]:
    return [
        row_of(Job("one", "/one"), transcript=transcript("good")),
        row_of(Job("two", "/two"), transcript=transcript("bad", avg_logprob=-1.5)),
        row_of(Job("3", "/3"), transcript=transcript("la la", compression_ratio=3.0)),
        row_of(Job("4", "/4"), transcript=transcript("")),
        row_of(
            Job("5", "/5"), error=AudioError("`/5` is empty", why="it has 0 bytes", code="empty")
        ),
        row_of(
            Job("6", "/6"), error=AudioError("`/6` is empty", why="it has 0 bytes", code="empty")
        ),
        row_of(Job(ATTACK, ATTACK), transcript=transcript(ATTACK), warnings=["2 damaged parts"]),
    ]


def summary() -> ArchiveSummary:
    identity = Identity(f"tiny {ATTACK}", "b" * 64, "0" * 64, {"whisperport": ATTACK})
    return summarize(rows(), identity, [Job("one", "/one")], 900.0)


def page() -> str:
    return report(rows(), Path("/out"), summary())


def shown(page: str) -> list[list[str]]:
    (document,) = re.findall(r'id="rows">(.*?)</script>', page)
    found: list[list[str]] = json.loads(document)
    return found


def test_speech_outside_of_a_grammar_is_marked() -> None:
    refused = Segment(0.0, 1.0, "", match=Match(False, 12.0))
    transcript = Transcript("", (refused,), "en", 1.0, ())

    assert marks(transcript, (), Thresholds()) == ["no match"]


def test_the_summary_counts_files_codes_languages_and_marks() -> None:
    found = summary()

    assert (found.files, found.failed, found.audio_s) == (7, 2, 5 * 1800.0)
    assert found.errors == {"empty": 2}
    assert found.languages == {"en": 5}
    assert found.marks == dict.fromkeys(
        ("low log-probability", "repeated text", "no speech", "damaged audio"), 1
    )
    assert (found.run_files, found.speed) == (1, 2.0)


def test_no_text_leaves_its_place_in_the_page() -> None:
    html = page()

    assert ATTACK not in html
    assert html.count("<script") == html.count("</script") == 2
    assert "<img" not in html
    assert "http" not in html.replace("http-equiv", "")


def test_the_page_has_every_row_for_the_search() -> None:
    found = shown(page())

    assert [row[0] for row in found] == ["one", "two", "3", "4", "5", "6", ATTACK]
    assert found[-1][2] == ATTACK
    assert found[4][4:6] == ["empty", "the file is empty: it has 0 bytes"]
    assert found[0][1] == "1800.0 s · en · confidence 61%"


def test_the_page_states_how_many_rows_it_leaves_out(monkeypatch: Any) -> None:
    monkeypatch.setattr("whisperport.apps.archive.report.MAX_SEARCHED", 100)

    assert "more rows are in the Parquet files only" in page()


def test_errors_are_grouped_by_code_with_their_meaning() -> None:
    assert "empty<br><span class='dim small'>The file has no samples" in page()


@pytest.mark.parametrize(
    ("path", "link"),
    [
        ("/talks/a b.wav", "./../talks/a%20b.wav"),
        ("/out/javascript:alert(1)", "./javascript%3Aalert%281%29"),
        ("/out/100%?#.wav", "./100%25%3F%23.wav"),
        ("/talks/caf\\udce9.wav", ""),
    ],
)
def test_a_link_to_the_audio_is_a_path_and_never_a_scheme(path: str, link: str) -> None:
    assert audio_link(path, Path("/out")) == link


def test_a_file_that_is_missing_has_no_link() -> None:
    lost = row_of(Job("a", "/a"), error=AudioError("`/a` does not exist", code="missing"))

    assert shown(report([lost], Path("/out"), summary()))[0][6] == ""


def test_the_name_of_a_subtitle_file_stays_in_its_folder() -> None:
    ids = ("../../etc/passwd", "a/b", "a_b", "", ".", "x" * 999, "会議" * 60, "é" * 99)
    names = {subtitle_name(id) for id in ids}

    assert len(names) == len(ids)
    assert all("/" not in name and not name.startswith("..") for name in names)
    assert max(len(f"{name}.srt".encode()) for name in names) <= 255


# Which rows are about the files that have their ids now: moved, changed, missing and other files

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
