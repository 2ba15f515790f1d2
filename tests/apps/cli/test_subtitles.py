"""`whisperport transcribe` cuts subtitles as it is asked to, and says where it cannot."""

import json

import pytest

from whisperport.apps.cli import live
from whisperport.apps.cli import transcribe as verb
from whisperport.speech.text import Segment, Word
from whisperport.transcription import Transcript

pytestmark = pytest.mark.usefixtures("any_bundle", "talk")

WORDS = (Word(" Lock", 0.0, 0.3, 0.9), Word(" the", 0.4, 0.5, 0.9), Word(" door.", 0.5, 1, 0.9))
SEGMENT = Segment(0.0, 1.0, " Lock the door.", words=WORDS)


@pytest.fixture
def spoken(run, monkeypatch):
    """`spoken("--output-format", "srt")`: of an audio file with the words "Lock the door."."""
    transcript = Transcript("Lock the door.", (SEGMENT,), "en", 1.0, ())
    monkeypatch.setattr(verb, "run_transcribe", lambda *_, **__: transcript)
    return lambda *arguments: run("transcribe", "talk.wav", *arguments)


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["--max-line-width", 8], "00:00.000 --> 00:01.000\nLock the\ndoor.\n"),
        (
            ["--max-line-width", 8, "--max-line-count", 1],
            "00:00.000 --> 00:00.500\nLock the\n\n00:00.500 --> 00:01.000\ndoor.\n",
        ),
        (
            ["--max-words-per-line", 2],
            "00:00.000 --> 00:00.500\nLock the\n\n00:00.500 --> 00:01.000\ndoor.\n",
        ),
        (
            ["--highlight-words", "--max-words-per-line", 1],
            "00:00.000 --> 00:00.300\n<u>Lock</u>\n\n00:00.400 --> 00:00.500\n<u>the</u>\n\n"
            "00:00.500 --> 00:01.000\n<u>door.</u>\n",
        ),
    ],
    ids=str,
)
def test_subtitles_are_cut_as_asked(spoken, arguments, lines):
    ran = spoken("--word-timestamps", "--output-format", "vtt", *arguments)

    assert (ran.code, ran.out) == (0, f"WEBVTT\n\n{lines}\n")


FLAGS = [
    ["--highlight-words"],
    ["--max-line-width", 40],
    ["--max-line-count", 2],
    ["--max-words-per-line", 3],
]


@pytest.mark.parametrize("arguments", FLAGS, ids=str)
def test_each_requires_word_timestamps(spoken, arguments):
    ran = spoken("--output-format", "srt", *arguments)

    assert (ran.code, ran.out) == (2, "")
    assert ran.lines[0] == f"error: {arguments[0]} requires --word-timestamps"


@pytest.mark.parametrize(
    "form", [[], ["--output-format", "tsv"], ["--output-format", "srt", "--json"]], ids=str
)
@pytest.mark.parametrize("arguments", FLAGS, ids=str)
def test_each_requires_a_subtitle_format(spoken, form, arguments):
    ran = spoken("--word-timestamps", *form, *arguments)

    assert (ran.code, ran.out) == (2, "")
    assert (
        ran.lines[0] == f"error: {arguments[0]} requires --output-format srt or --output-format vtt"
    )


@pytest.mark.parametrize(
    ("arguments", "warning"),
    [
        (["--max-line-count", 2], "--max-line-count has no effect without --max-line-width"),
        (
            ["--max-words-per-line", 3, "--max-line-count", 2, "--max-line-width", 40],
            "--max-words-per-line has no effect with --max-line-width and --max-line-count",
        ),
    ],
    ids=str,
)
def test_an_option_without_effect_gives_a_warning(spoken, arguments, warning):
    ran = spoken("--word-timestamps", "--output-format", "srt", *arguments)

    assert (ran.code, ran.lines[0]) == (0, f"warning: {warning}")


def test_live_always_has_word_timestamps(run, monkeypatch):
    transcript = Transcript("Lock the door.", (SEGMENT,), "en", 1.0, ())
    monkeypatch.setattr(live, "_transcribe", lambda *_: transcript)

    ran = run("live", "-", "--output-format", "srt", "--max-words-per-line", 2)

    assert ran.code == 0
    assert ran.out.splitlines()[2] == "Lock the"


def test_json_is_openai_whisper_s(spoken):
    ran = spoken("--output-format", "json", "--word-timestamps")

    data = json.loads(ran.out)
    assert sorted(data) == ["language", "segments", "text"]
    assert data["segments"][0]["words"][0]["word"] == " Lock"
