"""What is given to a verb is looked at before anything is read or exported: swapped arguments, numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whisperport.apps.bench.transcribing import BenchOptions
from whisperport.apps.cli import model_option
from whisperport.apps.cli.watchdog import run_watched
from whisperport.errors import UsageError
from whisperport.program.profiling import ProfileOptions
from whisperport.runtime import DecodeOptions, Thresholds
from whisperport.speech.audio import VadOptions
from whisperport.targets import RunOptions
from whisperport.targets.vendors.hailo.model_script import ScriptOptions
from whisperport.transcription import TranscribeOptions
from whisperport.transcription.live.live_options import LiveOptions

AUDIO, BUNDLE, CHECKPOINT, PROGRAM = "talk.wav", "words", "tuned", "decoder.onnx"
OUT = ("--target", "onnxruntime", "--out", "out")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each kind, known by what everybody sees: its name and the files in it."""
    monkeypatch.chdir(tmp_path)
    for file in (AUDIO, PROGRAM, f"{BUNDLE}/manifest.json", f"{CHECKPOINT}/config.json", "a.pt2"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text("{}")


@pytest.fixture(autouse=True)
def nothing_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("an export began")

    monkeypatch.setattr(model_option, "cached_bundle", fail)


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        (("transcribe", BUNDLE, AUDIO), "`words` is a bundle, not an audio", "--bundle words"),
        (("transcribe", AUDIO, BUNDLE), "`words` is a bundle, not an audio", "--bundle words"),
        (("transcribe", PROGRAM), "is a program, not an audio", "check decoder.onnx --target"),
        (("transcribe", "tiny.en"), "`tiny.en` is a checkpoint, not an", "--model tiny.en"),
        (("transcribe", AUDIO, "--bundle", AUDIO), "not a bundle", "transcribe talk.wav --model"),
        (("transcribe", AUDIO, "--bundle", "tiny"), "name of a model", "--model tiny`"),
        (("transcribe", AUDIO, "--model", BUNDLE), "not a checkpoint", "--bundle words"),
        (("live", BUNDLE), "not an audio file", "--bundle words"),
        (("export", AUDIO, *OUT), "not a checkpoint", "transcribe talk.wav --model NAME"),
        (("export", BUNDLE, *OUT), "not a checkpoint", "verify words"),
        (("export", PROGRAM, *OUT), "not a checkpoint", "check decoder.onnx --target NAME"),
        (("lower", "tiny", *OUT), "`tiny` is a checkpoint, not a program", "export tiny --target"),
        (("lower", CHECKPOINT, *OUT), "config.json", "export tuned --target NAME --out DIR"),
        (("lower", BUNDLE, *OUT), "not a program", "verify words"),
        (("lower", AUDIO, *OUT), "not a program", "transcribe talk.wav"),
        (("compile", "tiny"), "not a bundle or a program", "export tiny"),
        (("compile", AUDIO), "not a bundle or a program", "transcribe talk.wav"),
        (("bench", "tiny", AUDIO), "not a bundle or an audio file", "--model tiny"),
        (("bench", PROGRAM), "not a bundle or an audio file", "check decoder.onnx"),
        (("verify", AUDIO), "not a bundle", "transcribe talk.wav --model NAME"),
        (("verify", "default"), "not a bundle", "export default"),
        (("verify", PROGRAM), "not a bundle", "check decoder.onnx"),
        (("serve", "--bundle", "base"), "not a bundle", "--model base"),
        (("serve", "--model", BUNDLE), "not a checkpoint", "--bundle words"),
        (("archive", AUDIO, "-o", "out"), "not a folder or list", "transcribe talk.wav"),
        (("archive", BUNDLE, "-o", "out"), "not a folder or list", "--bundle words"),
        (("sensitivity", BUNDLE), "not a program or a checkpoint", "verify words"),
        (("sensitivity", AUDIO), "not a program or a checkpoint", "transcribe talk.wav"),
        (("check", AUDIO, "-t", "xnnpack"), "not a program or a bundle", "transcribe talk.wav"),
        (("inspect", "default"), "not a program or a bundle", "export default"),
        (("inspect", AUDIO), "not a program or a bundle", "transcribe talk.wav"),
        (("compare", AUDIO, PROGRAM), "not a program or a bundle", "transcribe talk.wav"),
        (("compare", PROGRAM, "tiny"), "not a program or a bundle", "export tiny"),
        (("plan", AUDIO), "not a bundle or a checkpoint", "transcribe talk.wav"),
        (("plan", "a.pt2"), "not a bundle or a checkpoint", "check a.pt2"),
        (("import", AUDIO, "--checkpoint", "tiny", "-o", "out"), "not a program", "talk.wav"),
    ],
)
def test_swapped_arguments_are_told_what_they_are_and_the_command(run, words, says, hint):
    ran = run(*words)

    assert (ran.code, ran.out) == (1, "")
    assert says in ran.err
    assert hint in ran.lines[-1]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("transcribe", "https://example.org/a.mp3"), "curl -LO https://example.org/a.mp3"),
        (("live", "rtsp://camera/1"), "download it"),
        (("transcribe", "file:///tmp/a.mp3"), "give the path: /tmp/a.mp3"),
        (("export", "https://huggingface.co/openai/whisper-tiny/tree/main", *OUT), "whisper-tiny"),
        (("archive", "s3://bucket/talks", "-o", "out"), "download it"),
        (("verify", "https://example.org/bundle"), "download it"),
        (("check", "HTTPS://example.org/a.onnx", "-t", "xnnpack"), "download it"),
    ],
)
def test_an_address_is_shown_as_typed_and_answered(run, words, hint):
    typed = next(word for word in words if "://" in word)

    ran = run(*words)

    assert ran.code == 1
    assert ran.lines[0] == f"error: `{typed}` is an address, not a file"
    assert hint in ran.lines[-1]


@pytest.mark.parametrize("verb", ["transcribe", "bench"])
def test_audio_is_looked_at_before_a_model_is_exported(run, verb):
    missing = run(verb, "no.wav", "--model", "default")
    broken = run(verb, AUDIO, "--model", "default")

    assert "no.wav" in missing.lines[0]
    assert "does not exist" in missing.lines[0]
    assert broken.lines[0] == "error: `talk.wav` is not an audio file"
    assert "it is a text, which begins with `{}`" in broken.lines[1]


def test_without_a_readable_file_no_model_is_exported(run):
    ran = run("transcribe", AUDIO, "no.wav", "--model", "default")

    assert ran.code == 1
    assert ran.lines[-3:] == [
        "0 of 2 audio files transcribed",
        "missing: talk.wav",
        "missing: no.wav",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("transcribe", "--model", "default", "--features", "no"),
        ("bench", "--model", "default", "--transcript", "no"),
        ("archive", "no", "--model", "default", "-o", "out"),
        ("serve", "--model", "default", "--api-key-file", "no"),
        ("serve", "--model", "default", "--certfile", "no", "--keyfile", "no"),
        ("export", "default", *OUT, "--calibration", "no"),
        ("export", "default", *OUT, "--verify-with", "no"),
        ("compile", BUNDLE, "--calibration", "no"),
        ("compile", PROGRAM, "--target", "rk3588", "--inputs", "no"),
        ("lower", "a.pt2", *OUT, "--inputs", "no"),
        ("fix", "a.pt2", *OUT, "--inputs", "no"),
        ("inspect", PROGRAM, "--inputs", "no"),
        ("compare", PROGRAM, PROGRAM, "--inputs", "no"),
        ("sensitivity", "default", "--inputs", "no"),
        ("diagnose", BUNDLE, "a.bin", "--quantization", "no"),
    ],
)
def test_a_missing_input_is_found_before_any_work(run, words):
    ran = run(*words)

    assert ran.code == 1
    assert ran.lines[0].startswith("error: `")
    assert ran.lines[0].endswith("no` does not exist")


@pytest.mark.parametrize(
    "words",
    [("judge",), ("check", *OUT[:2]), ("fix", *OUT), ("bench",), ("verify",), ("inspect",)],
)
def test_a_path_that_is_too_long_is_named_as_the_cause(run, words):
    ran = run(words[0], "n" * 300, *words[1:])

    assert ran.code == 1
    assert ran.lines[:2] == [f"error: `{'n' * 300}` does not exist", "  why: File name too long"]


@pytest.mark.parametrize("seconds", ["0.5", "0", "10.01"])
def test_an_impossible_window_is_refused_before_the_checkpoint_is_read(run, seconds):
    # given: a checkpoint that cannot be read
    ran = run("export", CHECKPOINT, *OUT, "--window", seconds)

    assert ran.code == 1
    assert ran.lines[0] == f"error: a window cannot be {float(seconds):g} s"


def test_a_window_that_is_too_long_for_a_known_model_is_refused_before_it_is_read(run):
    ran = run("export", "tiny", *OUT, "--window", "40")

    assert ran.lines[:2] == ["error: a window cannot be 40 s", "  why: expected 1 to 30 s"]


def test_an_option_of_a_target_that_the_bundle_lacks_says_which_it_has(run, bundle, wav):
    ran = run("transcribe", wav, "--bundle", bundle, "--run-option", "xnnpack.fast=1")

    assert ran.code == 1
    assert "no program here is for `xnnpack`: the targets are onnxruntime" in ran.err


def test_a_bundle_is_planned_for_its_own_target(run, bundle):
    ran = run("plan", bundle)

    assert ran.code == 1
    assert ran.lines[0] == "error: there is no estimate for the bundle's target `onnxruntime`"
    assert "aws-neuron" in ran.lines[-1]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("verify", "--bundle", BUNDLE), "hint: whisperport verify words"),
        (("inspect", "--bundle", "my words"), "hint: whisperport inspect 'my words'"),
        (("compile", "--force", "--bundle"), "hint: whisperport compile BUNDLE"),
        (("export", "--model", "tiny", *OUT), "hint: whisperport export tiny"),
        (("serve", BUNDLE), "hint: give it with `--bundle words`"),
        (("serve", "tiny.en"), "hint: give it with `--model tiny.en`"),
        (("archive", ".", BUNDLE, "-o", "out"), "hint: give it with `--bundle words`"),
    ],
)
def test_a_bundle_given_as_to_another_verb_is_told_how_this_one_takes_it(run, words, hint):
    ran = run(*words)

    assert (ran.code, ran.out) == (2, "")
    assert ran.lines[-1] == hint


# Numbers that no option takes: a usage error each, from Python as from the command line.

NUMBERS = [float("nan"), float("inf"), float("-inf"), 1e308, 2**63, -(2**63), -1e-9]
OPTIONS: list[tuple[Callable[..., Any], list[str]]] = [
    (RunOptions, ["threads"]),
    (ProfileOptions, ["threads", "repeat"]),
    (BenchOptions, ["repeat"]),
    (VadOptions, ["threshold", "min_speech_s", "min_silence_s", "pad_s", "max_silence_s"]),
    (LiveOptions, ["step_s", "pause_s"]),
    (Thresholds, ["compression_ratio_threshold", "no_speech_threshold"]),
    (TranscribeOptions, ["workers", "hallucination_silence_threshold"]),
    (ScriptOptions, ["optimization_level", "compression_level", "epochs"]),
    (
        DecodeOptions,
        [
            *("temperature", "max_tokens", "best_of", "beam_size", "patience", "length_penalty"),
            *("max_initial_timestamp", "repetition_penalty", "no_repeat_ngram_size"),
        ],
    ),
]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("options", "name"), [(options, name) for options, names in OPTIONS for name in names]
)
def test_an_option_of_python_takes_no_impossible_number(options, name, number):
    with pytest.raises(UsageError, match=f"`{name}` is"):
        options(**{name: number})


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("clip", [lambda n: (n,), lambda n: (0, n), lambda n: (0, 1, n)])
def test_a_clip_has_no_impossible_time(clip, number):
    with pytest.raises(UsageError, match="`clip_timestamps` are"):
        TranscribeOptions(clip_timestamps=clip(number))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e308, -1])
def test_a_job_is_not_watched_for_an_impossible_time(number, tmp_path):
    with pytest.raises(UsageError, match="`stall_s` is"):
        run_watched(print, out=tmp_path / "out", stall_s=number)


TRANSCRIBE = ["transcribe", "no-such-file.wav"]
LOWER = ["lower", "no-such-file.pt2", "--target", "onnxruntime", "--out", "out.onnx"]
ON_THE_COMMAND_LINE = [
    *[
        [*TRANSCRIBE, option, number]
        for option in (
            *("--threads", "--temperature", "--beam-size", "--best-of", "--patience"),
            *("--length-penalty", "--max-tokens", "--max-initial-timestamp", "--workers"),
            *("--no-repeat-ngram-size", "--repetition-penalty", "--compression-ratio-threshold"),
            *(
                "--logprob-threshold",
                "--no-speech-threshold",
                "--max-line-width",
                "--max-line-count",
            ),
            "--max-words-per-line",
        )
        for number in ("nan", "inf", "-inf", "1e308", str(-(2**63)))
    ],
    *[
        [*TRANSCRIBE, "--clip-timestamps", clips]
        for clips in ("1e308,inf", "nan,1", "0,nan", "inf,inf", "-1,1", "0,inf", "1e308")
    ],
    *[[*TRANSCRIBE, option, str(2**63)] for option in ("--threads", "--beam-size")],
    *[[*LOWER, "--stall-after", number] for number in ("inf", "1e308", "0", "-1")],
    *[["bench", "--repeat", str(2**63)], ["inspect", ".", "--repeat", str(2**63)]],
    ["compile", ".", "--stall-after", "inf"],
]


@pytest.mark.parametrize("arguments", ON_THE_COMMAND_LINE, ids=" ".join)
def test_the_command_line_takes_no_impossible_number(run, arguments):
    ran = run(*arguments)

    assert ran.code in (1, 2)
    assert ran.out == ""
    errors = [line for line in ran.lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert "unexpected error" not in errors[0]
    assert "no-such-file" not in errors[0]  # the number came first
