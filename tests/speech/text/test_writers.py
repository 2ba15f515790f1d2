"""Transcript files, byte for byte against openai-whisper's writers."""

import json
from pathlib import Path

import av
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from whisperport.errors import UsageError
from whisperport.speech.text import WRITERS, Segment, Word, format_time, write_as
from whisperport.system.printable import is_printable

from .openai_writers import as_openai, written_by_openai

SEGMENTS = [
    Segment(0.0, 2.5, " Hello, world.", (50364, 2425, 50489), -0.25, 0.01, 0.2, 1.1, 0),
    Segment(2.5, 3599.9996, " a --> b c ", seek=3000),
    Segment(3600.0, 36_000.123, "  日本語 👍 第二行 "),
    Segment(100 * 3600.0, 100 * 3600.5, ""),
]


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("segments", [SEGMENTS, SEGMENTS[:1], []], ids=["all", "one", "none"])
def test_each_form_is_openais(form: str, segments: list[Segment]) -> None:
    if form == "srt" and not segments:
        pytest.skip("see test_without_speech_the_subtitles_are_a_file_that_players_accept")

    text = write_as(form, segments, language="en")

    assert text == written_by_openai(form, segments, "en")


TIMES = st.floats(0, 400_000) | st.sampled_from([0.0, 59.9995, 59.9994, 3599.9995, 0.0005])


@given(
    form=st.sampled_from(sorted(WRITERS)),
    segments=st.lists(
        st.builds(Segment, TIMES, TIMES, st.text('ab ->"\\é👍\u200d\u200f', max_size=12))
    ),
    language=st.none() | st.sampled_from(["en", "yue"]),
)
@example(form="srt", segments=[Segment(0.0015, 3599.9999, "-->")], language=None)
@settings(max_examples=300)
def test_any_segments_are_written_as_by_openai(
    form: str, segments: list[Segment], language: str | None
) -> None:
    assume(segments or form != "srt")  # see below
    # A longer arrow is still one in openai-whisper's subtitles, which a text can forge by it.
    assume(form not in ("srt", "vtt") or not any("--->" in segment.text for segment in segments))

    text = write_as(form, segments, language=language)

    assert text == written_by_openai(form, segments, language)


def test_without_speech_the_subtitles_are_a_file_that_players_accept(tmp_path: Path) -> None:
    for form in ("srt", "vtt"):
        path = tmp_path / f"silence.{form}"
        path.write_text(write_as(form, []))

        with av.open(
            str(path)
        ) as file:  # an empty file is "Invalid data found when processing input"
            assert file.streams.subtitles
            assert [bytes(packet) for packet in file.demux() if packet.size] == []


HOSTILE = (
    "one\n\n2\n00:09.000 ---> 00:10.000\r\n0\t1\ttwo\x1b]0;title\x07\u2028\x85\x9b2J\u202ethree\x7f"
)


@pytest.mark.parametrize(("form", "lines"), [("txt", 1), ("tsv", 2), ("srt", 4), ("vtt", 5)])
def test_a_text_cannot_forge_lines_rows_or_subtitles(form: str, lines: int) -> None:
    text = write_as(form, [Segment(0.0, 1.0, HOSTILE)])

    assert len(text.splitlines()) == lines
    assert form in ("txt", "tsv") or text.count("-->") == 1
    assert text.count("\t") == (4 if form == "tsv" else 0)
    assert is_printable(text.replace("\n", "").replace("\t", ""))
    assert r"two\x1b]0;title\x07" in text
    assert r"\u202ethree\x7f" in text


def test_json_holds_control_characters_as_escapes() -> None:
    text = write_as("json", [Segment(0.0, 1.0, HOSTILE)])

    assert is_printable(text)
    assert json.loads(text)["text"] == HOSTILE


def test_right_to_left_text_and_joiners_are_ordinary() -> None:
    ordinary = "می\u200cخواهم \u200f(x)\u200e 👩\u200d🚒 \u061c\u00a0\u3000e\u0301"

    assert write_as("txt", [Segment(0.0, 1.0, ordinary)]) == f"{ordinary}\n"


def test_json_reads_back() -> None:
    data = json.loads(write_as("json", SEGMENTS, language=None))

    assert data == json.loads(json.dumps(as_openai(SEGMENTS, None)))
    assert data["language"] is None


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0, "00:00.000"), (59.9996, "01:00.000"), (3600.0, "01:00:00.000"), (1e6, "277:46:40.000")],
)
def test_times_roll_over(seconds: float, expected: str) -> None:
    assert format_time(seconds) == expected


def test_an_unknown_form_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="txt, srt, vtt, tsv, json"):
        write_as("docx", SEGMENTS)


@pytest.mark.parametrize(("start", "end"), [(-0.1, 1.0), (0.0, float("nan")), (float("inf"), 1.0)])
def test_a_segment_needs_two_times(start: float, end: float) -> None:
    with pytest.raises(ValueError, match="expected seconds"):
        Segment(start, end, "text")


def test_json_holds_words_as_openai_whisper_names_them() -> None:
    words = (Word(" Good", 0.5, 0.7, 0.99), Word(" evening.", 0.7, 1.25, 0.5))
    segment = Segment(0.5, 1.25, " Good evening.", words=words)

    data = json.loads(write_as("json", [segment]))

    assert data["segments"][0]["words"] == [
        {"word": " Good", "start": 0.5, "end": 0.7, "probability": 0.99},
        {"word": " evening.", "start": 0.7, "end": 1.25, "probability": 0.5},
    ]
