"""`whisperport transcribe` of several audio files."""

import json
from pathlib import Path
from typing import Any

import pytest

from whisperport.cli import several_files
from whisperport.errors import AudioError
from whisperport.text import Segment
from whisperport.transcription import Transcript

pytestmark = pytest.mark.usefixtures("any_bundle")

FILES = ("monday.mp3", "night/tuesday.wav")


def transcript(text: str) -> Transcript:
    segment = Segment(
        start=0.0,
        end=1.0,
        text=f" {text}",
        tokens=(1,),
        avg_logprob=-0.1,
        no_speech_prob=0.0,
        temperature=0.0,
        compression_ratio=1.0,
        seek=0,
    )
    return Transcript(text, (segment,), "en", 1.0, ())


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """File -> its transcript or error, in place of a transcription."""
    found: dict[str, Any] = {FILES[0]: transcript("one two"), FILES[1]: transcript("three\nfour")}
    monkeypatch.setattr(
        several_files, "transcribe_files", lambda files, *_: (found[file] for file in files)
    )
    return found


def test_each_file_is_one_line_with_its_name(run: Any, results: dict[str, Any]) -> None:
    ran = run("transcribe", *FILES)

    assert ran.code == 0
    assert ran.out.splitlines() == ["monday.mp3: one two", "night/tuesday.wav: three four"]


def test_a_folder_gets_a_transcript_of_each_file(
    run: Any, results: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "texts" / "week"

    ran = run("transcribe", *FILES, "--output-dir", str(folder), "--output-format", "srt")

    assert (ran.code, ran.out) == (0, "")
    assert sorted(path.name for path in folder.iterdir()) == ["monday.srt", "tuesday.srt"]
    assert "00:00:00,000 --> 00:00:01,000\none two" in (folder / "monday.srt").read_text()


def test_json_is_one_list_with_the_name_of_each_file(run: Any, results: dict[str, Any]) -> None:
    ran = run("transcribe", *FILES, "--json")

    found = json.loads(ran.out)
    assert [one["audio"] for one in found] == list(FILES)
    assert [one["text"] for one in found] == ["one two", "three\nfour"]


def test_a_file_that_fails_is_reported_and_the_others_are_transcribed(
    run: Any, results: dict[str, Any]
) -> None:
    results[FILES[0]] = AudioError("monday.mp3 holds no audio", hint="choose another file")

    ran = run("transcribe", *FILES)

    assert ran.code == 1
    assert ran.out == "night/tuesday.wav: three four\n"
    assert "monday.mp3 holds no audio" in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.mp3", "b.mp3", "--output-format", "srt"), "requires --output-dir"),
        (("a.mp3", "b.mp3", "--json", "--output-dir", "x"), "exclude each other"),
        (("a.mp3", "x/a.wav", "--output-dir", "x"), "two audio files"),
        (("a.mp3", "b.mp3", "--live"), "audio files only"),
        (("--output-dir", "x"), "audio files only"),
        (("a.mp3", "b.mp3", "--features", "out.bin"), "audio files only"),
    ],
)
def test_contradictions_are_usage_errors(
    arguments: tuple[str, ...], message: str, run: Any, results: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "out.bin").touch()
    given = [str(tmp_path / one) if one == "out.bin" else one for one in arguments]

    ran = run("transcribe", *given)

    assert ran.code == 2
    assert message in " ".join(ran.err.split())
