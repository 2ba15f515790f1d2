"""`live`: words go to stdout as they are decoded, and no transcript is lost. `archive`: its options."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import whisperport.apps.cli.live as verb
from whisperport import ArchiveOptions, ArchiveSummary
from whisperport.apps.archive import ArchiveProgress
from whisperport.apps.cli import archive as archive_verb
from whisperport.errors import AudioError, UsageError
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


archives = pytest.mark.usefixtures("any_bundle", "talk")

SUMMARY = ArchiveSummary(
    model="tiny",
    files=1000,
    failed=2,
    audio_s=36_000.0,
    languages={"en": 998},
    errors={"empty": 2},
    marks={},
    run_files=500,
    run_seconds=100.0,
    run_audio_s=18_000.0,
    bundle_sha256="b",
    options_sha256="0",
    versions={},
)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the archive_verb gave to `transcribe_archive`, in place of a transcription."""
    found: dict[str, Any] = {"summary": SUMMARY}

    def transcribe_archive(*given: Any, progress: Any) -> ArchiveSummary:
        names = ("source", "out", "bundle", "options", "transcribe")
        found.update(zip(names, given, strict=True))
        progress(ArchiveProgress(1000, 500, 2, 18_000.0, 100.0, 120.0))
        return found["summary"]

    monkeypatch.setattr(archive_verb, "transcribe_archive", transcribe_archive)
    return found


@archives
def test_every_option_reaches_the_function(run: Any, called: dict[str, Any]) -> None:
    run(
        *("archive", "talks", "--out", "rows", "--workers", "3", "--retry-failed"),
        *("--subtitles", "vtt", "--save-every", "5", "--ray", "--language", "de", "--threads", "2"),
        *("--vad", "--no-batch", "--no-word-timestamps"),
    )

    assert (called["source"], str(called["out"])) == ("talks", "rows")
    assert called["options"] == ArchiveOptions(
        workers=3,
        retry_failed=True,
        subtitles="vtt",
        save_every=5.0,
        ray="auto",
        word_timestamps=False,
    )
    transcribe = called["transcribe"]
    assert (transcribe.decode.language, transcribe.run.threads) == ("de", 2)
    assert (transcribe.batch, transcribe.workers) == (False, 1)
    assert transcribe.vad is not None


@archives
def test_the_result_names_the_causes_and_failed_files_give_status_1(
    run: Any, called: dict[str, Any]
) -> None:
    ran = run("archive", "talks", "--out", "rows")

    assert ran.code == 1
    assert ran.out.splitlines() == [
        "rows: 1000 files, 10.00 hours of audio, 2 failed",
        "this run: 500 files in 100 s, 180.0 times as fast as real time",
        "     2  empty: The file has no samples",
    ]
    assert "rows/report.html" in ran.err


@archives
def test_words_are_in_the_rows_unless_switched_off(run: Any, called: dict[str, Any]) -> None:
    run("archive", "talks", "--out", "rows")

    assert called["options"].word_timestamps


@archives
def test_json_is_the_summary(run: Any, called: dict[str, Any]) -> None:
    found = json.loads(run("archive", "talks", "--out", "rows", "--json").out)

    assert (found["files"], found["speed"]) == (1000, 180.0)


@archives
def test_the_progress_without_a_terminal_is_a_line_from_time_to_time(
    run: Any, called: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_verb, "NOTE_S", 0.0)

    assert (
        "500 of 1000 files, 5.00 h of audio, 180.0 times real time, 2 failed, about 2 min left"
        in run("archive", "talks", "--out", "rows").err
    )


@archives
def test_a_wrong_number_of_workers_is_wrong_usage(run: Any, called: dict[str, Any]) -> None:
    assert run("archive", "talks", "--out", "rows", "--workers", "0").code == 2
    with pytest.raises(UsageError):
        ArchiveOptions(workers=0)
