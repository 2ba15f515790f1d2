"""`whisperport live`: words go to stdout as they are decoded, and no transcript is lost."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import whisperport.apps.cli.live as verb
from whisperport.errors import AudioError
from whisperport.verification.clips import shipped_audio

from ...embedded import default_bundle

COMMAND = next(r for r in shipped_audio() if r.path.name.startswith("16"))


def raw() -> bytes:
    from whisperport.speech.audio import load_audio

    return np.round(load_audio(COMMAND.path) * 32767).astype("<i2").tobytes()


@pytest.fixture(autouse=True)
def four_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model speaks: no limit, unlike the random model's in `conftest.py`."""
    monkeypatch.setenv("WHISPERPORT_BUNDLE", str(default_bundle()))


def test_raw_standard_input_becomes_lines(run: Any) -> None:
    ran = run("live", "-", "--raw", 16000, stdin=raw())

    assert (ran.code, ran.out) == (0, f"{COMMAND.text}\n")
    assert ran.lines[-1] == "next: whisperport live - --output-format srt"


def test_json_is_written_at_the_end_with_words(run: Any) -> None:
    ran = run("live", "-", "--raw", 16000, "--json", stdin=raw())

    transcript = json.loads(ran.out)
    assert transcript["text"] == COMMAND.text
    assert transcript["segments"][0]["words"]


def test_audio_that_fails_leaves_its_transcript_and_exits_1(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> Iterator[np.ndarray]:
        yield np.frombuffer(raw(), "<i2").astype(np.float32) / 32768
        raise AudioError("the line went dead", hint="call again")

    monkeypatch.setattr(verb, "live_audio", failing)

    ran = run("live", "-", "--output-format", "srt")

    assert ran.code == 1
    assert COMMAND.text in ran.out
    assert "error: the line went dead" in ran.lines


def test_the_last_line_of_an_interrupted_transcript_is_complete(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given: the system ends the process while the audio arrives, as with SIGTERM
    def ended(*_: object) -> Iterator[np.ndarray]:
        yield from np.array_split(np.frombuffer(raw(), "<i2").astype(np.float32) / 32768, 4)
        raise KeyboardInterrupt

    monkeypatch.setattr(verb, "_arrived", ended)

    # when
    ran = run("live", "-", "--raw", 16000, stdin=b"")

    # then
    assert COMMAND.text.startswith(ran.out.strip())
    assert ran.out.endswith("\n")
    assert "is on standard output" in ran.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--raw", "16000"), "does not apply to the microphone"),
        (("-", "--microphone", "usb"), "exclude each other"),
        (("talk.mp3", "--vad"), "no such option"),
    ],
)
def test_options_that_contradict_each_other_are_wrong_usage(
    run: Any, arguments: tuple[str, ...], words: str
) -> None:
    ran = run("live", *arguments)

    assert ran.code == 2
    assert words in ran.err


def test_without_a_microphone_nothing_says_that_it_listens(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)  # importing it fails

    ran = run("live")

    assert ran.code == 1
    assert "cannot use a microphone" in ran.err
    assert "listening" not in ran.err
