"""Every decoding option reaches the transcriber; the transcript until a failure is printed."""

import json
from dataclasses import fields, replace

import pytest

from whisperport.apps.cli import transcribe as verb
from whisperport.errors import AudioError, IncompleteError, Interrupted
from whisperport.runtime import DecodeOptions, Thresholds
from whisperport.speech.text import Match, Segment
from whisperport.transcription import TranscribeOptions, Transcript

pytestmark = pytest.mark.usefixtures("any_bundle", "talk")

SEGMENT = Segment(
    start=0.0, end=28.0, text=" hello", tokens=(5,), avg_logprob=-0.1, no_speech_prob=0.0,
    temperature=0.0, compression_ratio=1.0, seek=0,
)  # fmt: skip
HELLO = Transcript("hello", (SEGMENT,), "en", 300.0, ())


@pytest.fixture(autouse=True)
def four_tokens():
    """Not here: the options are what is looked at."""


@pytest.fixture
def asked(run, monkeypatch):
    """`asked("--beam-size", 5)`: the options that the audio file is transcribed with."""
    seen = []

    def transcribe(audio, bundle, options, progress):
        seen.append(options)
        return HELLO

    monkeypatch.setattr(verb, "run_transcribe", transcribe)

    def asked(*arguments):
        ran = run("transcribe", "talk.wav", *arguments)
        assert ran.code == 0, ran.err
        return seen[-1]

    return asked


def test_without_options_the_defaults_are_those_of_the_python_interface(asked):
    assert asked() == TranscribeOptions()


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (("--language", "German"), "language", "German"),
        (("--task", "translate"), "task", "translate"),
        (("--without-timestamps",), "without_timestamps", True),
        (("--max-tokens", 100), "max_tokens", 100),
        (("--best-of", 5), "best_of", 5),
        (("--beam-size", 5), "beam_size", 5),
        (("--patience", 2), "patience", 2.0),
        (("--length-penalty", 0.5), "length_penalty", 0.5),
        (("--suppress-tokens", ""), "suppress_tokens", ()),
        (("--suppress-tokens", "-1,5"), "suppress_tokens", (-1, 5)),
        (("--no-suppress-blank",), "suppress_blank", False),
        (("--max-initial-timestamp", "none"), "max_initial_timestamp", None),
        (("--repetition-penalty", 1.2), "repetition_penalty", 1.2),
        (("--no-repeat-ngram-size", 3), "no_repeat_ngram_size", 3),
    ],
    ids=str,
)
def test_options_of_a_window(asked, arguments, name, value):
    assert asked(*arguments) == TranscribeOptions(decode=DecodeOptions(**{name: value}))


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        (("--temperature", 0, "--temperature", 0.5), {"temperatures": (0.0, 0.5)}),
        (("--initial-prompt", "a b"), {"initial_prompt": "a b"}),
        (("--carry-initial-prompt",), {"carry_initial_prompt": True}),
        (("--no-condition-on-previous-text",), {"condition_on_previous_text": False}),
        (("--prefix", "a b"), {"prefix": "a b"}),
        (("--word-timestamps",), {"word_timestamps": True}),
        (("--clip-timestamps", "1,2,3,4"), {"clip_timestamps": (1.0, 2.0, 3.0, 4.0)}),
        (("--clip-timestamps", "1,2,3"), {"clip_timestamps": (1.0, 2.0, 3.0)}),
        (
            ("--word-timestamps", "--hallucination-silence-threshold", 2),
            {"word_timestamps": True, "hallucination_silence_threshold": 2.0},
        ),
        (("--prepend-punctuations", "("), {"prepend_punctuations": "("}),
        (("--append-punctuations", ")"), {"append_punctuations": ")"}),
        (
            ("--compression-ratio-threshold", "none"),
            {"thresholds": Thresholds(compression_ratio_threshold=None)},
        ),
        (("--logprob-threshold", -2), {"thresholds": Thresholds(logprob_threshold=-2.0)}),
        (("--no-speech-threshold", 0.9), {"thresholds": Thresholds(no_speech_threshold=0.9)}),
    ],
    ids=str,
)
def test_options_of_an_audio_file(asked, arguments, changed):
    assert asked(*arguments) == replace(TranscribeOptions(), **changed)


def test_every_option_of_the_data_classes_can_be_given():
    # what is chosen otherwise: `--run-option`, `--temperature`, and prompts by their text
    elsewhere = {"temperature", "prompt", "prefix"}
    flags = {name for p in verb.transcribe.params for name in p.opts}

    for field in fields(DecodeOptions):
        assert f"--{field.name.replace('_', '-')}" in flags or field.name in elsewhere


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--suppress-tokens", "a,b"), "expected numbers separated by commas, got 'a,b'"),
        (("--clip-timestamps", "1-2"), "expected numbers separated by commas, got '1-2'"),
        (("--logprob-threshold", "low"), "expected a number or none, got 'low'"),
        (("--repetition-penalty", 0.5), "0.5 is not in the range 1 to 10"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_wrong_usage(run, arguments, words):
    ran = run("transcribe", "talk.wav", *arguments)

    assert ran.code == 2
    assert words in ran.err


@pytest.mark.parametrize("clips", ["0,inf,5,6", "inf,inf"])
def test_no_clip_ends_at_infinity(run, clips):
    ran = run("transcribe", "talk.wav", "--clip-timestamps", clips)

    assert (ran.code, ran.lines[0][:28]) == (1, "error: `clip_timestamps` are")


def test_speech_outside_of_the_grammar_has_a_note_with_its_time_and_score(run, monkeypatch):
    refused = replace(SEGMENT, text="", tokens=(), words=(), match=Match(False, 12.34))
    monkeypatch.setattr(
        verb, "run_transcribe", lambda *_, **__: replace(HELLO, text="", segments=(refused,))
    )

    ran = run("transcribe", "talk.wav")

    assert (ran.code, ran.out) == (0, "\n")
    assert f"{SEGMENT.start:.1f} s to {SEGMENT.end:.1f} s: no match (score 12.3)" in ran.lines
    assert "no speech was found in the audio" not in ran.lines


def test_segments_without_a_word_are_no_speech(run, monkeypatch):
    cleared = replace(SEGMENT, text="", tokens=(), words=())
    monkeypatch.setattr(
        verb, "run_transcribe", lambda *_, **__: replace(HELLO, text="", segments=(cleared,))
    )

    ran = run("transcribe", "talk.wav")

    assert (ran.code, ran.out) == (0, "\n")
    assert "no speech was found in the audio" in ran.lines


@pytest.mark.parametrize("arguments", [(), ("--json",), ("--output-format", "srt")], ids=str)
@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        (IncompleteError("it broke", HELLO, why="the disk is gone"), 1, "error: it broke"),
        (Interrupted(HELLO), 130, "interrupted: the transcript of the first 28.0 s"),
    ],
    ids=["a failure", "Ctrl-C"],
)
def test_what_was_transcribed_before_is_printed(run, monkeypatch, arguments, failure, code, words):
    def transcribe(*_, **__):
        raise failure

    monkeypatch.setattr(verb, "run_transcribe", transcribe)

    ran = run("transcribe", "talk.wav", *arguments)

    assert ran.code == code
    assert words in ran.err
    assert ran.lines[-1].endswith("the transcript of the first 28.0 s is on standard output")
    if arguments == ("--json",):
        assert json.loads(ran.out)["text"] == "hello"
    else:
        assert "hello" in ran.out


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        (AudioError("it is no sound"), 1, "error: it is no sound"),
        (Interrupted(replace(HELLO, segments=(), text="")), 130, "interrupted: nothing was left"),
    ],
    ids=["a failure", "Ctrl-C"],
)
def test_a_failure_before_the_first_word_prints_no_result(run, monkeypatch, failure, code, words):
    def transcribe(*_, **__):
        raise failure

    monkeypatch.setattr(verb, "run_transcribe", transcribe)

    ran = run("transcribe", "talk.wav")

    assert (ran.code, ran.out) == (code, "")
    assert words in ran.err
