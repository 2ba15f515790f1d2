"""`whisperport bench` and `transcribe --features`, as a person sees them."""

import json
import re
from functools import cache

import numpy as np
import pytest

from whisperport.apps.bench import transcribing
from whisperport.apps.bench.acceptance import AcceptanceRow, check_accuracy
from whisperport.apps.bench.roofline import Rates
from whisperport.apps.bench.transcribing import BenchResult, Part
from whisperport.program.bundle import Bundle
from whisperport.targets import RunOptions
from whisperport.transcription import Transcriber
from whisperport.verification import TextErrors
from whisperport.verification.clips import shipped_audio
from whisperport.verification.reference import Reference

from ...embedded import default_bundle

PARTS = ("load", "mel", "encoder", "cross_kv", "prefill_4", "step", "Python", "total")


@cache
def accuracy():
    """The accuracy of the embedded model, which tests/apps/bench measures."""
    bundle = Bundle.open(default_bundle())
    return check_accuracy(bundle, Transcriber(bundle).engine, RunOptions())


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """Measure neither memory nor the machine, and the accuracy once; tests/apps/bench does all of it."""
    monkeypatch.setattr(transcribing, "peak_memory_mib", lambda *_, **__: None)
    monkeypatch.setattr(transcribing, "check_accuracy", lambda *_: accuracy())
    monkeypatch.setattr("whisperport.apps.cli.bench.measure_rates", lambda _: Rates(20, 100, 400))


@pytest.fixture
def audio():
    return shipped_audio()[0].path


@pytest.mark.needs("torch")
def test_the_default_model_is_split_into_its_parts_beside_its_accuracy(run, audio):
    ran = run("bench", audio, "--model", "default", "--repeat", "1", "--threads", "1")

    assert ran.code == 0
    for part in PARTS:
        assert re.search(rf"^{part} .*\d% +\d+\.\d$", ran.out, re.MULTILINE), part
    for normalizer in ("", r" \(Whisper normalizer\)"):
        rate = rf"^word error rate{normalizer} +\d+\.\d% \(\d+ errors in \d+ words\)$"
        assert re.search(rate, ran.out, re.M), normalizer
    assert re.search(r"^real-time factor +\d\.\d+, for 4\.7 s of audio", ran.out, re.MULTILINE)
    assert re.search(r"^CPU time +\d\.\d{4} s per second of audio, without", ran.out, re.MULTILINE)
    decoder = r"^CPU time of the decoder +\d\.\d{4} s per .*; of the encoder: \d\.\d{4} s$"
    assert re.search(decoder, ran.out, re.MULTILINE)
    assert re.search(r"^peak memory +not measured$", ran.out, re.MULTILINE)
    assert re.search(r"^acceptance +value +reference +result +evidence$", ran.out, re.MULTILINE)
    assert re.search(r"^encoder latency +\d+\.\d\d ms +run here: onnxruntime$", ran.out, re.M)
    assert re.search(r"^clips with equal tokens +6 +6 +pass +run here: onnxr", ran.out, re.M)
    assert re.search(r"^word error rate, 6 clips +0\.00% +0\.00% +pass +run here", ran.out, re.M)
    assert "threads: 1" in ran.out
    assert ran.lines[-1].startswith("next: whisperport verify ")
    assert max(map(len, ran.out.splitlines())) <= 100


def test_a_page_shows_each_program_beside_its_limit_and_needs_no_network(run, audio, tmp_path):
    page = tmp_path / "page.html"

    ran = run(
        *("bench", default_bundle(), audio, "--repeat", "1", "--threads", "1", "--html", page)
    )

    assert ran.code == 0
    row = r"^encoder +fp32 +\d+\.\d MB +\d+\.\d\d G +\d+\.\d\d ms +\d+\.\d\d ms +\d+%$"
    assert re.search(row, ran.out, re.MULTILINE)
    text = page.read_text()
    assert re.search(r"<td>encoder<td><div class=.*>fp32<td class=\"n\">\d+\.\d MB", text)
    assert len(re.findall(r'<span class="(part|mark fill)"', text)) == len(PARTS) - 1
    assert re.search(
        r'"big">4\.7 s of audio in .*: real-time factor 0\.\d+, word error rate \d', text
    )
    assert "<code>whisperport verify " in text
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|<script|src=", text)


def test_two_bundles_are_compared_with_their_ratio(run, audio):
    ran = run("bench", default_bundle(), default_bundle(), audio, "--repeat", "1")

    assert ran.code == 0
    assert re.search(r"^ms +A +B +B / A$", ran.out, re.MULTILINE)
    assert re.search(r"^step +\d+\.\d +\d+\.\d +\d+\.\d\d$", ran.out, re.MULTILINE)
    for label in ("CPU s per audio s", "of the decoder"):
        assert re.search(rf"^{label} +\d\.\d{{4}} +\d\.\d{{4}} +\d", ran.out, re.MULTILINE), label
    assert re.search(r"^word error rate +\d+\.\d% +\d+\.\d%$", ran.out, re.MULTILINE)
    normalized = r"^word error rate \(Whisper normalizer\) +\d+\.\d% +\d+\.\d%$"
    assert re.search(normalized, ran.out, re.MULTILINE)
    assert max(map(len, ran.out.splitlines())) <= 100


@pytest.mark.needs("torch")
def test_in_json_parts_add_up_and_name_the_machine(run, audio):
    ran = run("bench", audio, "--model", "default", "--repeat", "1", "--json", "--word-timestamps")

    data = json.loads(ran.out)
    result = data["results"][0]
    assert sum(part["total_ms"] for part in result["parts"]) == pytest.approx(result["total_ms"])
    cpu = {part["name"]: part["cpu_ms"] for part in result["parts"]}
    assert "align" in cpu
    assert result["decoder_cpu_s_per_audio_s"] < result["cpu_s_per_audio_s"]
    assert result["cpu_s_per_audio_s"] * result["audio_s"] * 1e3 == pytest.approx(
        sum(cpu.values()) - cpu["load"]
    )
    assert 0 <= result["wer"] < 0.5
    assert 0 <= result["wer_whisper_normalizer"] < 0.5
    accepted = {row["metric"]: row for row in result["acceptance"]}
    assert accepted["encoder latency"]["value"] > 0
    assert accepted["encoder latency"]["evidence"] == "run here"
    assert accepted["clips with equal tokens"]["value"] == 6
    assert accepted["prefill latency (prefill_64)"]["value"] is None
    assert data["machine"]["cpu"]
    assert data["versions"]["onnxruntime"]


def test_times_of_an_emulation_are_named_and_not_in_the_acceptance_table(run, monkeypatch):
    # given: the result of a bundle whose encoder was emulated; tests of targets make real ones
    def row(metric, program, **value):
        return AcceptanceRow(metric=metric, programs=(program,), **value)

    on_a_chip = {"targets": ("hailo8l",), "evidence": "emulated on the CPU"}
    on_both = {"targets": ("hailo8l", "onnxruntime"), "evidence": "emulated on the CPU"}
    failed = {"passed": False, "rule": "the same tokens", "reason": "token 3 of 9 is the first"}
    result = BenchResult(
        bundle=default_bundle(),
        name="mixed",
        audio="a.wav",
        audio_s=2.0,
        parts=(Part("encoder", 1, 40.0, 40.0, 40.0),),
        total_ms=40.0,
        real_time_factor=0.02,
        cpu_s_per_audio_s=0.02,
        encoder_cpu_s_per_audio_s=0.02,
        decoder_cpu_s_per_audio_s=0.0,
        peak_memory_mib=None,
        text="",
        errors=TextErrors(length=9),
        whisper_errors=TextErrors(length=9),
        rounds=1,
        acceptance=(
            row("encoder latency", "encoder", value=None, unit="ms", **on_a_chip),
            row(
                "clips with equal tokens",
                "all",
                value=5,
                unit="clips",
                reference=6,
                **failed,
                **on_both,
            ),
        ),
        how={"encoder": "emulated on the CPU", "step": "run here"},
    )
    monkeypatch.setattr("whisperport.apps.cli.bench.run_bench", lambda *_, **__: [result])

    ran = run("bench", "--model", "default")

    assert ran.code == 0
    assert re.search(
        r"^encoder latency +not measured +emulated on the CPU: hailo8l$", ran.out, re.M
    )
    tokens = r"^clips with equal tokens +5 +6 +FAIL +emulated on the CPU: hailo8l, onnxruntime$"
    assert re.search(tokens, ran.out, re.M)
    assert "FAIL: clips with equal tokens: token 3 of 9 is the first" in ran.out
    assert "these times are not those of the device:\n  encoder\n" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 100


@pytest.mark.needs("torch")
def test_errors_are_counted_in_characters_where_asked(run, audio):
    arguments = ("bench", audio, "--model", "default", "--repeat", "1", "--errors-in", "characters")
    ran, data = run(*arguments), json.loads(run(*arguments, "--json").out)

    assert re.search(r"^character error rate +\d+\.\d% \(\d+ errors in \d+ chara", ran.out, re.M)
    assert 0 <= data["results"][0]["cer"] < 0.5
    assert data["results"][0]["cer_whisper_normalizer"] == data["results"][0]["cer"]
    assert "wer" not in data["results"][0]


@pytest.mark.needs("torch")
def test_a_transcript_gives_an_own_audio_file_an_error_rate(run, audio, tmp_path):
    own, transcript = tmp_path / "own.wav", tmp_path / "own.txt"
    own.write_bytes(audio.read_bytes())
    transcript.write_text("nothing of the kind", encoding="utf-8")

    without = run("bench", own, "--model", "default", "--repeat", "1")
    known = run("bench", own, "--model", "default", "--repeat", "1", "--transcript", transcript)

    assert "give it with --transcript" in without.out
    assert re.search(r"^word error rate +\d{3}\.\d% \(", known.out, re.MULTILINE)


def test_a_path_that_does_not_exist_is_an_error(run, tmp_path):
    ran = run("bench", tmp_path / "absent")

    assert ran.code == 1
    assert ran.lines[0] == f"error: {tmp_path / 'absent'} does not exist"
    assert "hint:" in ran.err


def test_two_audio_files_are_wrong_usage(run, audio):
    assert run("bench", audio, audio, "--model", "default").code == 2


def test_a_folder_that_is_no_bundle_and_a_transcript_that_is_not_text_are_rejected(
    run, audio, tmp_path
):
    noise = tmp_path / "noise.txt"
    noise.write_bytes(b"\xff\xfe\x00\xd8")
    (tmp_path / "empty").mkdir()

    no_bundle = run("bench", tmp_path / "empty", audio)
    no_text = run("bench", audio, "--model", "default", "--transcript", noise)
    no_audio = run("bench", noise, "--model", "default")

    assert (no_bundle.code, no_text.code, no_audio.code) == (1, 1, 1)
    assert "is not a bundle" in no_bundle.lines[0]
    assert "cannot read the transcript" in no_text.err
    assert "error: " in no_audio.err


# transcribe --features


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
