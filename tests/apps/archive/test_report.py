"""The report: its numbers, and text that tries to leave its place."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from whisperport.apps.archive.identity import Identity
from whisperport.apps.archive.job import Job
from whisperport.apps.archive.report import audio_link, report
from whisperport.apps.archive.rows import row_of
from whisperport.apps.archive.subtitle_files import subtitle_name
from whisperport.apps.archive.summary import ArchiveSummary, summarize
from whisperport.errors import AudioError
from whisperport.speech.text import Segment
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
    names = {subtitle_name(one) for one in ("../../etc/passwd", "a/b", "a_b", "", ".", "x" * 999)}

    assert len(names) == 6
    assert all("/" not in name and not name.startswith("..") and len(name) < 120 for name in names)
