"""The report: its numbers, and text that tries to leave its place."""

import json
import re
from typing import Any

from whisperport.archive.identity import Identity
from whisperport.archive.job import Job
from whisperport.archive.report import report
from whisperport.archive.rows import row_of
from whisperport.archive.subtitle_files import subtitle_name
from whisperport.archive.summary import ArchiveSummary, cause_of, summarize
from whisperport.errors import AudioError
from whisperport.text import Segment
from whisperport.transcription import Transcript

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
        row_of(Job("5", "/5"), error=AudioError("`/5` is empty", why="it has 0 bytes")),
        row_of(Job("6", "/6"), error=AudioError("`/6` is empty", why="it has 0 bytes")),
        row_of(Job(ATTACK, ATTACK), transcript=transcript(ATTACK), warnings=["2 damaged parts"]),
    ]


class AnyBundle:
    class manifest:  # noqa: N801
        name = f"tiny {ATTACK}"


def summary() -> ArchiveSummary:
    identity = Identity("b" * 64, "0" * 64, {"whisperport": ATTACK})
    bundle: Any = AnyBundle()
    return summarize(rows(), bundle, identity, [Job("one", "/one")], 900.0)


def test_the_summary_counts_files_causes_languages_and_marks() -> None:
    found = summary()

    assert (found.files, found.failed, found.audio_s) == (7, 2, 5 * 1800.0)
    assert found.errors == {"the file is empty: it has 0 bytes": 2}
    assert found.languages == {"en": 5}
    assert found.marks == dict.fromkeys(
        ("low log-probability", "repeated text", "no speech", "damaged audio"), 1
    )
    assert (found.run_files, found.speed) == (1, 2.0)


def test_no_text_leaves_its_place_in_the_page() -> None:
    page = report(rows(), summary())

    assert ATTACK not in page
    assert page.count("<script") == page.count("</script") == 2
    assert "<img" not in page
    assert "http" not in page.replace("http-equiv", "")


def test_the_page_has_every_row_for_the_search() -> None:
    page = report(rows(), summary())

    (document,) = re.findall(r'id="rows">(.*?)</script>', page)
    found = json.loads(document)
    assert [row[0] for row in found] == ["one", "two", "3", "4", "5", "6", ATTACK]
    assert found[-1][3] == ATTACK
    assert found[4][5] == "the file is empty: it has 0 bytes"


def test_the_page_states_how_many_rows_it_leaves_out(monkeypatch: Any) -> None:
    monkeypatch.setattr("whisperport.archive.report.MAX_SEARCHED", 100)

    assert "more rows are in the Parquet files only" in report(rows(), summary())


def test_a_cause_is_the_same_for_all_paths() -> None:
    five, six = (row for row in rows() if row["error"])

    assert cause_of(five) == cause_of(six)


def test_the_name_of_a_subtitle_file_stays_in_its_folder() -> None:
    names = {subtitle_name(one) for one in ("../../etc/passwd", "a/b", "a_b", "", ".", "x" * 999)}

    assert len(names) == 6
    assert all("/" not in name and not name.startswith("..") and len(name) < 120 for name in names)
