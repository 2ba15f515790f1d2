"""Transcript files and subtitles, byte for byte against openai-whisper's writers."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import av
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from whisper.utils import get_writer

from whisperport.errors import UsageError
from whisperport.speech.text import WRITERS, Segment, SubtitleOptions, Word, format_time, write_as
from whisperport.system.printable import is_printable

from ...extent import core_or_all

# What openai-whisper's own writers write of our segments.


def as_openai(segments: list[Segment], language: str | None) -> dict[str, Any]:
    """What openai-whisper's `transcribe()` would have returned."""
    order = "seek start end text tokens temperature avg_logprob compression_ratio no_speech_prob"
    dicts = [asdict(segment) for segment in segments]
    return {
        "text": "".join(segment.text for segment in segments),
        "segments": [
            {"id": i, **{name: d[name] for name in order.split()}}
            | ({} if d["words"] is None else {"words": list(d["words"])})
            for i, d in enumerate(dicts)
        ],
        "language": language,
    }


def written_by_openai(
    form: str,
    segments: list[Segment],
    language: str | None = None,
    options: SubtitleOptions | None = None,
) -> str:
    file = io.StringIO(newline="")
    chosen = asdict(options) if options else {}
    get_writer(form, ".").write_result(as_openai(segments, language), file=file, **chosen)
    return file.getvalue()


# Transcript files, byte for byte against openai-whisper's writers.

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


# Subtitles by the words, byte for byte against openai-whisper's writers.


def segment(*words: str, start: float = 0.0, each: float = 0.4, gap: float = 0.1) -> Segment:
    """One that says `words`, `gap` seconds apart."""
    step = each + gap
    timed = tuple(
        Word(word, round(start + i * step, 2), round(start + i * step + each, 2), 0.9)
        for i, word in enumerate(words)
    )
    end = timed[-1].end if timed else start
    return Segment(start, end, "".join(words), words=timed)


ENGLISH = [
    segment(" Turn", " right", " at", " the", " station,", " then", " go", " right."),
    segment(" Lock", " the", " door.", start=4.0),
    segment(
        " My", " number", " is", " nine", " seven", " five.", start=12.0
    ),  # a long pause before
]
WITHOUT_WORDS = Segment(0.5, 0.5, "", words=())
CLIPS = {
    "english": ENGLISH,
    "a gap within a segment": [segment(" one", " two", " three", gap=3.5)],
    "chinese, without spaces": [segment(*"请在车站右转,然后再右转。"), segment(*"锁门", start=9)],
    "arabic, right to left": [segment(" استدر", " يمينا", " عند", " المحطة\u200f.")],
    "hebrew and english": [segment(" פנה", " right", " בתחנה", " (station)", ".")],
    "a word longer than the line": [segment(" a", " Donaudampfschifffahrtsgesellschaft", " b")],
    "spaces inside, before and after": [segment("  two ", "  three ", " a b", " ", "", "c ")],
    "a short arrow and tags": [segment(" ->", " <u>x</u>", " &", r" \1")],
    "marks on their own": [segment(" e\u0301", "\u0301", " 👩\u200d🚒", " \u00a0", "\u3000x")],
    "no words at all": [WITHOUT_WORDS],
    "none at the beginning": [WITHOUT_WORDS, *ENGLISH],
    "none in the middle": [ENGLISH[0], WITHOUT_WORDS, ENGLISH[1]],
    "nothing": [],
}
OPTIONS = {
    "as it is": SubtitleOptions(),
    "highlighted": SubtitleOptions(highlight_words=True),
    "narrow": SubtitleOptions(max_line_width=12),
    "two words": SubtitleOptions(max_words_per_line=2),
    "a count alone": SubtitleOptions(max_line_count=1),
    "narrow, two lines": SubtitleOptions(max_line_width=12, max_line_count=2),
    "narrow, two lines, highlighted": SubtitleOptions(
        max_line_width=12, max_line_count=2, highlight_words=True
    ),
    "all": SubtitleOptions(
        max_line_width=9, max_line_count=1, max_words_per_line=3, highlight_words=True
    ),
}


# openai-whisper's SubRip of no speech is an empty file, which FFmpeg rejects.
NOTHING = "1\n00:00:00,000 --> 00:00:00,001\n\n\n"


@pytest.mark.parametrize("form", ["srt", "vtt"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("segments", CLIPS.values(), ids=CLIPS)
def test_subtitles_are_openais(
    form: str, options: SubtitleOptions, segments: list[Segment]
) -> None:
    expected = written_by_openai(form, segments, options=options)

    assert write_as(form, segments, options=options) == (expected or NOTHING)


CUE_TIMES = st.floats(0, 20) | st.sampled_from([0.0, 0.0005, 2.9995, 59.9996, 3599.9999, 1e5])
# Without control characters and arrows: there openai-whisper's subtitles can be forged, and ours differ.
ORDINARY = st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]).filter(is_printable)
TEXTS = st.text(' ab,-<u中ا\u200f\u0301"', max_size=8) | st.text(ORDINARY, max_size=4)
WORDS = st.builds(Word, TEXTS, CUE_TIMES, CUE_TIMES, st.just(0.5))
LIMITS = st.none() | st.integers(1, 12)
CUES = st.builds(Segment, CUE_TIMES, CUE_TIMES, TEXTS, words=st.lists(WORDS, max_size=6).map(tuple))


@given(
    form=st.sampled_from(["srt", "vtt"]),
    segments=st.lists(CUES, max_size=4),
    options=st.builds(
        SubtitleOptions,
        highlight_words=st.booleans(),
        max_line_width=LIMITS,
        max_line_count=LIMITS,
        max_words_per_line=LIMITS,
    ),
)
@example(  # more words in a segment than the original's own limit
    form="srt",
    segments=[segment(*(" a" for _ in range(1001)), gap=0)],
    options=SubtitleOptions(max_line_width=3000),
)
@settings(max_examples=core_or_all(150, 500))
def test_any_words_are_cut_as_by_openai(
    form: str, segments: list[Segment], options: SubtitleOptions
) -> None:
    expected = written_by_openai(form, segments, options=options)
    assume(expected.count("-->") == expected.count(" --> "))

    assert write_as(form, segments, options=options) == (expected or NOTHING)


FORGED = "00:00:09.000 --> 00:00:10.000"


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("form", ["srt", "vtt"])
def test_words_cannot_forge_a_subtitle(form: str, options: SubtitleOptions) -> None:
    # given: a subtitle of its own, in words; the arrow in one word, and in pieces
    words = (" a\n\n", "2\n", FORGED, "\nforged\r\n\x1b[2J", " 00:09.000 --", "->", " 00:10.000")

    written = write_as(form, [segment(*words)], options=options)

    times = [line for line in written.split("\n") if "-->" in line]
    n_subtitles = len(written.split("\n\n")) - (2 if form == "vtt" else 1)
    assert len(times) == n_subtitles
    assert all(line.startswith("00:0") and "09.000 -->" not in line for line in times)
    assert "\x1b" not in written
    assert "\r" not in written


def shown(segments: Sequence[Segment], options: SubtitleOptions) -> list[str]:
    """The text of each subtitle."""
    blocks = write_as("srt", segments, options=options).split("\n\n")
    return [block.split("\n", 2)[2] for block in blocks if block]


def test_lines_run_on_over_segments_until_a_pause() -> None:
    texts = shown(ENGLISH, SubtitleOptions(max_line_width=20, max_line_count=2))

    assert texts == [
        "Turn right at the\nstation, then go",
        "right. Lock the\ndoor.",
        "My number is nine\nseven five.",
    ]


def test_each_word_is_underlined_while_it_is_spoken() -> None:
    texts = shown(ENGLISH[1:2], SubtitleOptions(highlight_words=True))

    assert texts == [
        "<u>Lock</u> the door.",
        "Lock the door.",
        "Lock <u>the</u> door.",
        "Lock the door.",
        "Lock the <u>door.</u>",
    ]


def test_a_segment_cleared_for_it_had_no_text_does_not_hide_those_without_words() -> None:
    spoken = Segment(1.0, 2.0, " hello")

    written = write_as("srt", [WITHOUT_WORDS, spoken])  # where openai-whisper fails, KeyError

    assert "hello" in written


@pytest.mark.parametrize("options", list(OPTIONS.values())[1:], ids=list(OPTIONS)[1:])
def test_segments_without_word_timestamps_are_rejected(options: SubtitleOptions) -> None:
    with pytest.raises(UsageError) as caught:
        write_as("vtt", [Segment(0.0, 1.0, " hello")], options=options)

    assert caught.value.why == "the segments have no word timestamps"


@pytest.mark.parametrize("form", ["txt", "tsv", "json"])
def test_forms_that_are_no_subtitles_reject_the_options(form: str) -> None:
    with pytest.raises(UsageError, match=f"`max_line_width` is for subtitles, not for {form}"):
        write_as(form, ENGLISH, options=SubtitleOptions(max_line_width=20))


@pytest.mark.parametrize("name", ["max_line_width", "max_line_count", "max_words_per_line"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_below_one_is_rejected(name: str, value: int) -> None:
    with pytest.raises(UsageError, match=f"`{name}` is {value}"):
        SubtitleOptions(**{name: value})
