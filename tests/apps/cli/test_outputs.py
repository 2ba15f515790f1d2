"""Where verbs write: transcripts, subtitles, and the files of several audio files."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from whisperport.apps.cli import live, several_files
from whisperport.apps.cli import transcribe as verb
from whisperport.apps.cli.given import Given
from whisperport.apps.cli.main import cli
from whisperport.apps.cli.paths import OutputPath, check_paths, input_paths
from whisperport.build.export.bundle_cache import VARIABLE
from whisperport.errors import AudioError, UsageError
from whisperport.speech.text import Segment, Word
from whisperport.transcription import Transcript

# Every verb says in its options what it writes; none of it replaces what the verb reads.

VERBS: dict[str, click.Command] = dict(cli.commands)
# Options that name a place to write to. A new one that is not declared as an output fails a test below.
WRITES = {"out", "html", "output", "work", "write_inputs"}


def outputs_of(command: click.Command) -> list[click.Parameter]:
    return [option for option in command.params if isinstance(option.type, OutputPath)]


def takes_path(option: click.Parameter) -> bool:
    """Whether a text of the user reaches the verb through this parameter."""
    is_text = isinstance(option.type, click.Path | click.types.StringParamType | Given)
    return is_text and not isinstance(option.type, OutputPath)


def cases() -> Iterator[Any]:
    for name, command in VERBS.items():
        for output in outputs_of(command):
            if output.type.kind is not None:  # type: ignore[attr-defined]
                for given in filter(takes_path, command.params):
                    yield pytest.param(
                        command, output, given, id=f"{name}-{output.name}-{given.name}"
                    )


@pytest.mark.parametrize(("command", "output", "given"), list(cases()))
@pytest.mark.parametrize("named", ["alone", "after an equals sign", "through a link"])
def test_no_output_of_a_verb_is_one_of_its_inputs(
    command: click.Command, output: Any, given: Any, named: str, tmp_path: Path
) -> None:
    path = written = tmp_path / "given"
    is_folder = output.type.kind in ("folder", "bundle")
    path.mkdir() if is_folder else path.write_text("the user's own")
    if named == "through a link":
        written = tmp_path / "link"
        written.symlink_to(path)
    text = f"NAME={path}" if named == "after an equals sign" else str(path)
    many = given.multiple if isinstance(given, click.Option) else given.nargs == -1
    context = click.Context(command)
    context.params = {output.name: written, given.name: (text,) if many else text}

    with pytest.raises(UsageError, match="cannot write"):
        check_paths(context)


def test_every_place_to_write_to_is_declared_as_an_output() -> None:
    declared = {option.name for command in VERBS.values() for option in outputs_of(command)}
    paths = {
        option.name for command in VERBS.values() for option in filter(takes_path, command.params)
    }

    assert declared == WRITES
    assert not paths & WRITES


def test_inputs_are_all_that_exists_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("bundle", "talk.wav", "-x", "a=b.npy")
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    context = click.Context(VERBS["transcribe"])
    context.params = {
        "bundle": Path("bundle"),
        "files": ("talk.wav", "missing.wav", "n" * 300, "nul\0", "", "-"),
        "chosen": ["NAME=-x", "a=b.npy"],
        "output": Path("bundle"),
        "threads": 2,
    }

    assert input_paths(context) == [Path(name) for name in ("bundle", "talk.wav", "-x", "a=b.npy")]
    assert input_paths(context, "files")[0] == Path("bundle")


@pytest.mark.parametrize("link", [False, True])
def test_the_bundle_that_the_environment_names_is_an_input(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: bool
) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "manifest.json").write_text("of the bundle")
    (tmp_path / "link").symlink_to(bundle)
    (tmp_path / "talk.wav").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "link" if link else bundle))
    output = str(bundle / "manifest.json")

    ran = run("transcribe", str(tmp_path / "talk.wav"), "-o", output, "--overwrite")

    assert ran.code != 0
    assert "it is a file of the input" in ran.err
    assert (bundle / "manifest.json").read_text() == "of the bundle"


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "bundle", "talk.wav", "--html", "talk.wav"),
        ("bench", "bundle", "talk.wav", "--transcript", "talk.txt", "--html", "talk.txt"),
        ("sensitivity", "model.onnx", "--html", "model.onnx"),
        ("sensitivity", "model.onnx", "--inputs", "in", "--html", "in/0.npz"),
        ("verify", "bundle", "--html", "bundle/manifest.json"),
        ("inspect", "model.onnx", "--html", "weights.bin"),
        ("check", "model.onnx", "--target", "xnnpack", "--html", "weights.bin"),
        ("fix", "p.pt2", "-t", "xnnpack", "-o", "new.pt2", "--html", "new.pt2"),
        ("fix", "p.pt2", "-t", "xnnpack", "-o", "in/0.npz", "--inputs", "in/0.npz"),
        ("export", "model.pt", "--target", "onnxruntime", "-o", "new", "--html", "model.pt"),
        ("export", "model.pt", "--target", "onnxruntime", "-o", "new", "--html", "new/page.html"),
        ("export", "bundle/x.pt", "--target", "onnxruntime", "-o", "bundle"),
        ("import", "bundle/x.hef", "--checkpoint", "tiny", "-o", "bundle"),
        ("lower", "p.pt2", "--target", "onnxruntime", "-o", "pipe.onnx"),
        ("lower", "p.pt2", "--target", "onnxruntime", "--inputs", "in/0.npz", "-o", "in/0.npz"),
        ("compile", "model.onnx", "--target", "rk3588", "--inputs", "in", "--work", "in"),
        ("diagnose", "bundle", "--write-inputs", "bundle"),
        ("demo", "-o", "talk.wav"),
        ("archive", "in", "--model", "default", "-o", "in"),
    ],
)
def test_a_file_of_the_user_is_as_it_was(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "in").mkdir()
    files = ("talk.wav", "talk.txt", "model.onnx", "model.pt", "weights.bin", "p.pt2", "in/0.npz")
    for name in (*files, "bundle/manifest.json", "bundle/x.pt", "bundle/x.hef"):
        (tmp_path / name).write_text(f"the user's {name}")
    os.mkfifo(tmp_path / "pipe.onnx")
    before = {path: path.lstat() for path in tmp_path.rglob("*")}
    monkeypatch.chdir(tmp_path)

    ran = run(*command)

    assert ran.code != 0
    for part in ("cannot write", "why:", "hint:"):
        assert part in ran.err
    after = {path: path.lstat() for path in tmp_path.rglob("*")}
    assert {path: (one.st_ino, one.st_mtime_ns) for path, one in after.items()} == {
        path: (one.st_ino, one.st_mtime_ns) for path, one in before.items()
    }


# `whisperport transcribe` cuts subtitles as it is asked to, and says where it cannot.

WORDS = (Word(" Lock", 0.0, 0.3, 0.9), Word(" the", 0.4, 0.5, 0.9), Word(" door.", 0.5, 1, 0.9))
SEGMENT = Segment(0.0, 1.0, " Lock the door.", words=WORDS)


@pytest.fixture
def spoken(run, monkeypatch):
    """`spoken("--output-format", "srt")`: of an audio file with the words "Lock the door."."""
    transcript = Transcript("Lock the door.", (SEGMENT,), "en", 1.0, ())
    monkeypatch.setattr(verb, "run_transcribe", lambda *_, **__: transcript)
    return lambda *arguments: run("transcribe", "talk.wav", *arguments)


@pytest.mark.usefixtures("any_bundle", "talk")
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


@pytest.mark.usefixtures("any_bundle", "talk")
@pytest.mark.parametrize("arguments", FLAGS, ids=str)
def test_each_requires_word_timestamps(spoken, arguments):
    ran = spoken("--output-format", "srt", *arguments)

    assert (ran.code, ran.out) == (2, "")
    assert ran.lines[0] == f"error: {arguments[0]} requires --word-timestamps"


@pytest.mark.usefixtures("any_bundle", "talk")
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


@pytest.mark.usefixtures("any_bundle", "talk")
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


@pytest.mark.usefixtures("any_bundle", "talk")
def test_live_always_has_word_timestamps(run, monkeypatch):
    transcript = Transcript("Lock the door.", (SEGMENT,), "en", 1.0, ())
    monkeypatch.setattr(live, "_transcribe", lambda *_: transcript)

    ran = run("live", "-", "--output-format", "srt", "--max-words-per-line", 2)

    assert ran.code == 0
    assert ran.out.splitlines()[2] == "Lock the"


@pytest.mark.usefixtures("any_bundle", "talk")
def test_json_is_openai_whisper_s(spoken):
    ran = spoken("--output-format", "json", "--word-timestamps")

    data = json.loads(ran.out)
    assert sorted(data) == ["language", "segments", "text"]
    assert data["segments"][0]["words"][0]["word"] == " Lock"


# `whisperport transcribe` of several audio files.

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


@pytest.mark.usefixtures("any_bundle")
def test_each_file_is_one_line_with_its_name(run: Any, results: dict[str, Any]) -> None:
    ran = run("transcribe", *FILES)

    assert ran.code == 0
    assert ran.out.splitlines() == ["monday.mp3: one two", "night/tuesday.wav: three four"]


@pytest.mark.usefixtures("any_bundle")
def test_a_folder_gets_a_transcript_of_each_file(
    run: Any, results: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "texts" / "week"

    ran = run("transcribe", *FILES, "--output-dir", str(folder), "--output-format", "srt")

    assert (ran.code, ran.out) == (0, "")
    assert sorted(path.name for path in folder.iterdir()) == ["monday.srt", "tuesday.srt"]
    assert "00:00:00,000 --> 00:00:01,000\none two" in (folder / "monday.srt").read_text()


@pytest.mark.usefixtures("any_bundle")
def test_json_is_one_list_with_the_name_of_each_file(run: Any, results: dict[str, Any]) -> None:
    ran = run("transcribe", *FILES, "--json")

    found = json.loads(ran.out)
    assert [one["audio"] for one in found] == list(FILES)
    assert [one["text"] for one in found] == ["one two", "three\nfour"]


@pytest.mark.usefixtures("any_bundle")
def test_a_file_that_fails_is_reported_and_the_others_are_transcribed(
    run: Any, results: dict[str, Any]
) -> None:
    results[FILES[0]] = AudioError("monday.mp3 holds no audio", hint="choose another file")

    ran = run("transcribe", *FILES)

    assert ran.code == 1
    assert ran.out == "night/tuesday.wav: three four\n"
    assert "monday.mp3 holds no audio" in ran.err


@pytest.mark.usefixtures("any_bundle")
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


@pytest.mark.usefixtures("any_bundle")
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


@pytest.mark.usefixtures("any_bundle")
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


@pytest.mark.usefixtures("any_bundle")
def test_one_audio_file_may_have_the_name_of_its_transcript(
    run: Any, results: dict[str, Any], tmp_path: Path
) -> None:
    ran = run("transcribe", FILES[0], "-o", tmp_path / "talk.srt")

    assert ran.code == 0
    assert "one two" in (tmp_path / "talk.srt").read_text()


@pytest.mark.usefixtures("any_bundle")
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


@pytest.mark.usefixtures("any_bundle")
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


@pytest.mark.usefixtures("any_bundle")
def test_a_folder_of_one_audio_file_is_printed_with_its_name(
    run: Any, results: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "a.mp3"
    file.touch()
    results[str(file)] = transcript("one")

    assert run("transcribe", tmp_path).out == f"{file}: one\n"


@pytest.mark.usefixtures("any_bundle")
def test_of_a_large_folder_archive_is_named(
    run: Any, results: dict[str, Any], tmp_path: Path
) -> None:
    for number in range(100):
        file = tmp_path / f"{number:03}.mp3"
        file.touch()
        results[str(file)] = transcript("one")

    assert "whisperport archive" in run("transcribe", tmp_path).err


@pytest.mark.usefixtures("any_bundle")
def test_a_folder_without_audio_is_an_error_that_names_archive(run: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()

    ran = run("transcribe", tmp_path)

    assert ran.code == 1
    assert f"there is no audio file in the folder `{tmp_path}`" in ran.err
    assert "whisperport archive" in ran.lines[-1]
