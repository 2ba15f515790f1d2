"""`whisperport transcribe` of several audio files."""

import json
from pathlib import Path
from typing import Any

import pytest

from whisperport.apps.cli import several_files
from whisperport.errors import AudioError
from whisperport.speech.text import Segment
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
    monkeypatch.setattr(several_files, "check_audio", lambda _: None)
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
        (("a.mp3", "b.mp3", "--output-dir", "talk.srt"), "give a folder"),
        (("a.mp3", "--output-dir", "talk.srt", "-f", "vtt"), "contradict each other"),
        (("a.mp3", "--overwrite"), "requires --output-dir"),
        (("--output-dir", "x"), "missing argument 'AUDIO'"),
        ((), "`whisperport live` uses the microphone"),
        (("a.mp3", "b.mp3", "--features", "out.bin"), "--features and AUDIO exclude each other"),
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


def test_transcripts_that_cannot_be_written_do_not_end_the_batch(
    run: Any, results: dict[str, Any], tmp_path: Path
) -> None:
    long, same = f"{'x' * 254}.mp3", "again/monday.mp3"
    (tmp_path / "folder.txt").mkdir()
    for name in (long, same, "folder.mp3"):
        results[name] = transcript("never")

    ran = run("transcribe", long, "folder.mp3", FILES[0], same, FILES[1], "-o", tmp_path)

    assert ran.code == 1
    written = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    assert written == {"monday.txt": "one two\n", "tuesday.txt": "three four\n"}
    summary = ["2 of 5 audio files transcribed"]
    summary += [f"missing: {name}" for name in (long, "folder.mp3", same)]
    assert ran.lines[-4:] == summary


def test_a_transcript_that_fails_to_be_written_does_not_end_the_batch(
    run: Any, results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcomes(files: Any, *_: Any) -> Any:
        (tmp_path / "monday.txt").mkdir()  # after the names were checked
        yield from (results[file] for file in files)

    monkeypatch.setattr(several_files, "transcribe_files", outcomes)

    ran = run("transcribe", *FILES, "-o", tmp_path)

    assert ran.code == 1
    assert (tmp_path / "tuesday.txt").read_text() == "three four\n"
    assert ran.lines[-2:] == ["1 of 2 audio files transcribed", "missing: monday.mp3"]


def test_one_audio_file_may_have_the_name_of_its_transcript(
    run: Any, results: dict[str, Any], tmp_path: Path
) -> None:
    ran = run("transcribe", FILES[0], "-o", tmp_path / "talk.srt")

    assert ran.code == 0
    assert "one two" in (tmp_path / "talk.srt").read_text()


def test_existing_transcripts_are_replaced_only_with_overwrite(
    run: Any, results: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "monday.txt").write_text("mine")

    refused = run("transcribe", *FILES, "-o", tmp_path)
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    replaced = run("transcribe", *FILES, "-o", tmp_path, "--overwrite")

    assert (refused.code, left) == (2, {"monday.txt": "mine"})
    assert "--overwrite" in refused.err
    assert replaced.code == 0
    assert (tmp_path / "monday.txt").read_text() == "one two\n"


def test_a_folder_is_its_audio_files_by_name(
    run: Any, results: dict[str, Any], tmp_path: Path
) -> None:
    # given: audio of two suffixes, a file that is none, and audio in a subfolder
    (tmp_path / "older").mkdir()
    for name in ("b.WAV", "a.mp3", "a.txt", "older/c.wav"):
        (tmp_path / name).touch()
    for name in ("a.mp3", "b.WAV"):
        results[str(tmp_path / name)] = transcript(name)

    ran = run("transcribe", tmp_path, FILES[0])

    assert ran.code == 0
    assert ran.lines[0] == f"{tmp_path}: 2 audio files, without those in its subfolders"
    texts = [line.partition(": ")[2] for line in ran.out.splitlines()]
    assert texts == ["a.mp3", "b.WAV", "one two"]


def test_a_folder_of_one_audio_file_is_printed_with_its_name(
    run: Any, results: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "a.mp3"
    file.touch()
    results[str(file)] = transcript("one")

    assert run("transcribe", tmp_path).out == f"{file}: one\n"


def test_of_a_large_folder_archive_is_named(
    run: Any, results: dict[str, Any], tmp_path: Path
) -> None:
    for number in range(100):
        file = tmp_path / f"{number:03}.mp3"
        file.touch()
        results[str(file)] = transcript("one")

    assert "whisperport archive" in run("transcribe", tmp_path).err


def test_a_folder_without_audio_is_an_error_that_names_archive(run: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()

    ran = run("transcribe", tmp_path)

    assert ran.code == 1
    assert f"there is no audio file in the folder `{tmp_path}`" in ran.err
    assert "whisperport archive" in ran.lines[-1]
