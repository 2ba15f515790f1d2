"""`whisperport transcribe --features`, as a person sees it."""

import json

import numpy as np
import pytest

from whisperport.program.bundle import Bundle
from whisperport.verification.reference import Reference

from ...embedded import default_bundle


@pytest.fixture(autouse=True)
def embedded_bundle(monkeypatch):
    monkeypatch.setenv("WHISPERPORT_BUNDLE", str(default_bundle()))


@pytest.fixture(scope="module")
def clip():
    return Reference.from_arrays(Bundle.open(default_bundle()).reference()).clips[0]


@pytest.fixture
def output(clip, tmp_path):
    path = tmp_path / "output.bin"
    clip.features.tofile(path)
    return path


def test_a_good_output_becomes_a_transcript_at_once(run, clip, output):
    ran = run("transcribe", "--features", output, "--threads", "1")

    assert ran.code == 0
    assert ran.out.strip()  # the tests of this folder decode four tokens
    assert clip.text.startswith(ran.out.strip())


def test_several_files_are_consecutive_windows_with_words_and_subtitles(run, output):
    files = ("--features", output, "--features", output)
    ran = run("transcribe", *files, "--json", "--word-timestamps")
    subtitles = run("transcribe", *files, "--output-format", "srt")

    found = json.loads(ran.out)
    assert found["duration_s"] == 60
    assert found["segments"][0]["words"]
    assert found["segments"][-1]["start"] >= 30
    assert "00:00:3" in subtitles.out


def test_what_was_recognized_is_printed(run, clip, output, tmp_path):
    half = tmp_path / "half.bin"
    clip.features.astype("<f2").tofile(half)

    ran = run("transcribe", "--features", half, "--features-like", half)

    assert ran.code == 0
    assert ran.out.strip()  # the tests of this folder decode four tokens
    assert clip.text.startswith(ran.out.strip())
    assert "float16" in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("talk.wav",), "--features and AUDIO exclude each other"),
        (("--output-dir", "x"), "--features and --output-dir exclude each other"),
        (("--vad",), "--features and --vad exclude each other"),
    ],
)
def test_features_and_audio_exclude_each_other(run, output, arguments, said):
    ran = run("transcribe", "--features", output, *arguments)

    assert ran.code == 2
    assert said in ran.err


def test_options_about_features_need_a_file(run):
    ran = run("transcribe", "talk.wav", "--features-dtype", "int8")

    assert ran.code == 2
    assert "requires --features" in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--features-like", "a.bin", "--features-dtype", "int8"), "cannot be used together"),
        (("--features-clip", "a.wav"), "`clip` requires `like`"),
        (("--features-zero-point", "3"), "a zero point requires a scale"),
        (("--clip-timestamps", "1,2"), "`clip_timestamps` cannot be used with features"),
        (("--features-like", "absent.bin"), "absent.bin"),
        (("--features-like", "absent.bin", "--features-clip", "no-such"), "no-such"),
    ],
)
def test_options_that_contradict_each_other_are_errors(run, output, arguments, said):
    ran = run("transcribe", "--features", output, *arguments)

    assert ran.code == 1
    assert said in ran.err
    assert ran.out == ""


@pytest.mark.parametrize("content", [b"", b"x", b"\x93NUMPY\x01\x00garbage", bytes(768_000)])
def test_a_file_that_holds_no_features_is_an_error(run, tmp_path, content):
    path = tmp_path / "output.bin"
    path.write_bytes(content)

    ran = run("transcribe", "--features", path)

    assert ran.code == 1
    assert ran.lines[0].startswith("error: ")
    assert str(path) in ran.err
    assert "hint:" in ran.err
    assert ran.out == ""


def test_a_missing_file_and_a_folder_are_errors(run, tmp_path):
    missing, folder = (run("transcribe", "--features", tmp_path / name) for name in ("absent", "."))

    assert missing.code == 1
    assert "absent" in missing.err
    assert folder.code in (1, 2)


def test_nan_is_an_error_that_names_the_next_command(run, clip, tmp_path):
    features = clip.features.copy()
    features[3] = np.nan
    features.tofile(tmp_path / "output.bin")

    ran = run("transcribe", "--features", tmp_path / "output.bin")

    assert ran.code == 1
    assert "128 values that are not finite" in ran.err
    assert "whisperport diagnose BUNDLE FILE" in ran.err
