"""What each verb prints: the result on stdout, the next command on stderr's last line."""

import importlib
import json
import re
import shutil
import sys
from dataclasses import replace

import pytest

from whisperport.apps.cli.evidence_words import mix_words
from whisperport.errors import WhisperportError
from whisperport.program.bundle import Bundle
from whisperport.program.placement import Placement
from whisperport.system.machine import INSTRUCTION_SETS
from whisperport.targets import TARGETS

from ...embedded import default_bundle

# What each verb prints: the result on stdout, the next command on stderr's last line.


def last_line_names_a_command(ran):
    assert re.fullmatch(r"next: whisperport \w+ ?.*", ran.lines[-1])


def test_verify_shows_every_level_and_passes(run, bundle):
    ran = run("verify", bundle)

    assert ran.code == 0
    for level in ("arrays", "tokens", "words", "isolation"):
        assert re.search(rf"^{level} .*pass$", ran.out, re.MULTILINE)
    assert ran.out.splitlines()[-1] == f"{bundle}: verified"
    last_line_names_a_command(ran)


def test_verify_exits_1_and_says_what_differs(run, bundle, monkeypatch):
    # given: a rule that no arithmetic in floating point can meet
    from whisperport.verification import Gate, array_checks

    strict = Gate(min_cosine=0.0, min_sqnr_db=1e6, max_relative=1.0, because="a test")
    monkeypatch.setattr(array_checks, "limit_of", lambda *_, **__: strict)

    ran = run("verify", bundle)

    assert ran.code == 1
    assert f"{bundle}: NOT VERIFIED" in ran.out
    assert re.search(r"^FAIL: encoder, .* SQNR .* dB is below 1e\+06 dB", ran.out, re.MULTILINE)
    assert "next:" not in ran.err


def test_verify_in_json_is_the_report(run, bundle):
    ran = run("verify", bundle, "--json")

    report = json.loads(ran.out)
    assert report["passed"] is True
    assert {check["level"] for check in report["checks"]} == set(report["required"])


def test_transcribe_prints_the_text_alone(run, bundle, wav):
    ran = run("transcribe", wav, "--bundle", bundle, "--language", "en")

    assert ran.code == 0
    assert len(ran.out.splitlines()) == 1
    last_line_names_a_command(ran)


def test_transcribe_reads_standard_input(run, bundle, wav):
    by_name = run("transcribe", wav, "--bundle", bundle, "--language", "en", "--json")

    by_pipe = run(
        *("transcribe", "-", "--bundle", bundle, "--language", "en", "--json"),
        stdin=wav.read_bytes(),
    )

    assert by_pipe.code == 0
    assert json.loads(by_pipe.out) == json.loads(by_name.out)


def test_transcribe_in_json_has_segments_with_times(run, bundle, wav):
    transcript = json.loads(run("transcribe", wav, "--bundle", bundle, "--json").out)

    assert transcript["duration_s"] == 1.0
    assert transcript["segments"]
    assert all(0 <= s["start"] <= s["end"] for s in transcript["segments"])


def test_export_shows_where_each_program_went(run, tiny_checkpoint_folder, tmp_path, bundle):
    # given: the export itself takes half a minute, and has tests of its own
    import whisperport.apps.cli.export
    from whisperport import Bundle, Exported

    with pytest.MonkeyPatch.context() as patch:
        exported = Exported.of(Bundle.open(bundle))
        patch.setattr(whisperport.apps.cli.export, "export_best", lambda *_, **__: exported)

        ran = run("export", tiny_checkpoint_folder, "-t", "onnxruntime", "-o", tmp_path)
        in_json = run("export", tiny_checkpoint_folder, "-t", "x", "-o", tmp_path, "--json")

    assert ran.code == 0
    assert re.search(r"^encoder +onnxruntime +\d+ +0 +run here$", ran.out, re.MULTILINE)
    last_line_names_a_command(ran)
    assert json.loads(in_json.out)["verified"] is True


def test_export_for_a_chip_that_is_not_here_says_so_and_sends_one_to_compile(
    run, bundle, tmp_path, monkeypatch
):
    # given: a bundle whose programs are all for such a chip
    import whisperport.apps.cli.export
    from whisperport import Bundle, Exported

    manifest = Bundle.open(bundle).manifest
    programs = tuple(
        replace(
            entry,
            placement=Placement("hailo8", "w8a8"),
            evidence=tuple(replace(one, kind="emulated") for one in entry.evidence),
        )
        for entry in manifest.programs
    )
    made = replace(Bundle.open(bundle), manifest=replace(manifest, programs=programs))
    exported = Exported.of(made)
    monkeypatch.setattr(whisperport.apps.cli.export, "export_best", lambda *_, **__: exported)

    ran = run("export", "default", "--target", "hailo8", "--out", tmp_path / "out")

    assert ran.out.splitlines()[-1].endswith("out: verified; emulated on the CPU: hailo8")
    assert ran.lines[-1] == (
        f"next: whisperport compile {tmp_path / 'out'} --calibration AUDIO_DIR"
    )


@pytest.mark.needs("torch")
def test_targets_says_what_this_project_did_with_versions_and_what_is_installed(run):
    ran = run("targets")

    assert re.search(r"^xnnpack .*run here +yes +yes$", ran.out, re.MULTILINE)
    assert re.search(r"^xnnpack +run +executorch \S+ +\d{4}-\d\d-\d\d ", ran.out, re.MULTILINE)
    assert re.search(r"^hailo8 .*checked against", ran.out, re.MULTILINE)
    assert re.search(r"^hailo8 +emulated on the CPU +onnxruntime ", ran.out, re.MULTILINE)
    last_line_names_a_command(ran)
    listed = [spec["name"] for spec in json.loads(run("targets", "--json").out)]
    assert listed == [target.spec.name for target in TARGETS]
    assert {"onnxruntime", "xnnpack", "litert", "hailo8", "genio720", "sm8650"} <= set(listed)


@pytest.fixture
def board(monkeypatch):
    """A machine with the core install alone. Blocks the search for torch and what needs it."""
    import importlib.util

    find, absent = importlib.util.find_spec, {"torch", "onnx", "onnxscript", "executorch"}
    absent |= {"torchao", "safetensors", "huggingface_hub"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else find(name)
    )


@pytest.mark.usefixtures("board")
def test_targets_on_a_board_says_which_extra_is_missing_and_sends_nobody_to_export(run):
    ran = run("targets")

    assert re.search(r"^onnxruntime .*no: \[export\] +yes$", ran.out, re.MULTILINE)
    assert re.search(r"^xnnpack .*no: \[xnnpack\] +no: \[xnnpack\]$", ran.out, re.MULTILINE)
    assert ran.lines[-1] == "next: whisperport doctor"


@pytest.mark.usefixtures("board")
def test_demo_on_a_board_is_rejected_before_any_work(run, tmp_path):
    ran = run("demo", "--out", tmp_path / "out")

    assert (ran.code, ran.out) == (1, "")
    assert ran.lines[-1] == 'hint: pip install "whisperport[export]"'
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("board")
def test_doctor_on_a_board_says_how_to_get_what_is_missing_and_exits_0(run):
    ran = run("doctor")

    assert ran.code == 0  # a board needs no torch
    assert 'pip install "whisperport[export]"' in ran.out
    assert 'pip install "whisperport[xnnpack]"' in ran.out
    last_line_names_a_command(ran)


@pytest.mark.needs("torch")
def test_doctor_where_all_is_there_names_versions_and_nothing_to_install(run):
    ran = run("doctor")

    assert ran.code == 0
    assert re.search(r"^torch +2\.\S+ ", ran.out, re.MULTILINE)
    assert "pip install" not in ran.out
    assert json.loads(run("doctor", "--json").out)["embedded_model"] == "complete"


def test_doctor_says_which_interpreter_has_a_vendors_compiler_or_how_to_name_it(run, monkeypatch):
    def compilers():
        packages = json.loads(run("doctor", "--json").out)["packages"]
        return [one for one in packages if one["needed_for"] == "compiling with hailo"]

    (missing,) = compilers()
    monkeypatch.setenv("WHISPERPORT_TOOLCHAIN_HAILO", sys.executable)
    (found,) = compilers()
    monkeypatch.setenv("WHISPERPORT_TOOLCHAIN_HAILO", "/nowhere/python")
    (wrong,) = compilers()

    assert missing["version"] == wrong["version"] == "not installed"
    assert "WHISPERPORT_TOOLCHAIN_HAILO" in missing["fix"]
    assert (found["version"], found["fix"]) == (f"in {sys.executable}", "")


def test_doctor_exits_1_when_the_embedded_model_is_damaged(run, tmp_path, monkeypatch):
    from whisperport.speech.data import embedded_model

    damaged = shutil.copytree(embedded_model.model_folder(), tmp_path / "model")
    weights = damaged / "model.safetensors.xz"
    weights.write_bytes(weights.read_bytes()[:-1000])
    monkeypatch.setattr(embedded_model, "model_folder", lambda: damaged)

    ran = run("doctor")

    assert ran.code == 1
    assert "embedded model  damaged or missing" in ran.out
    assert any(line.startswith("error: the embedded model is damaged") for line in ran.lines)


def demo_row(bundle):
    from pathlib import Path

    from whisperport.apps.demo import DemoRow, Transcribed
    from whisperport.verification import TextErrors
    from whisperport.verification.clips import ShippedAudio

    audio = ShippedAudio(Path("one.wav"), "Lock the door.", "a voice", True, 1.0, ())
    transcribed = Transcribed(
        clip=audio,
        text="Lock a door.",
        errors=TextErrors(1, 0, 0, 3),
        whisper_errors=TextErrors(1, 0, 0, 4),
    )
    return DemoRow(
        target="onnxruntime",
        folder=bundle,
        programs=5,
        delegated=592,
        undelegated=0,
        sqnr_db=129.0,
        tokens_equal=(6, 6),
        encoder_ms=77.3,
        token_ms=1.49,
        transcribed=(transcribed,),
        real_time_factor=0.013,
    )


def test_demo_prints_transcripts_and_one_table(run, bundle, monkeypatch):
    # given: the demo itself takes minutes, and `make demo` runs it
    import whisperport.apps.cli.demo

    monkeypatch.setattr(whisperport.apps.cli.demo, "run_demo", lambda *_, **__: [demo_row(bundle)])
    chosen = ("default", "model: the embedded one, because")
    monkeypatch.setattr(whisperport.apps.cli.demo, "choose_checkpoint", lambda: chosen)

    ran = run("demo")

    assert ran.code == 0
    assert re.search(r"^one\.wav .*1 of 3 +Lock a door\.$", ran.out, re.MULTILINE)
    assert re.search(
        r"^onnxruntime .*592 of 592 +129 dB +6 of 6 +33\.3% +25\.0%", ran.out, re.MULTILINE
    )
    last_line_names_a_command(ran)
    data = json.loads(run("demo", "--json").out)[0]
    assert data["wer"] == pytest.approx(1 / 3)
    assert data["wer_whisper_normalizer"] == pytest.approx(1 / 4)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("verb", ["targets", "doctor"])
def test_no_line_is_wider_than_100_columns_away_from_a_terminal(run, verb, monkeypatch):
    known = tuple(INSTRUCTION_SETS)
    module = importlib.import_module("whisperport.verification.machine")
    monkeypatch.setattr(module, "instruction_sets", lambda: known)

    assert max(len(line) for line in run(verb).out.splitlines()) <= 100


@pytest.mark.parametrize("verb", ["targets", "doctor"])
def test_a_file_gets_no_colour_codes(run, verb):
    ran = run(verb)

    assert "\x1b" not in ran.out + ran.err


def test_an_interrupt_exits_130_and_says_that_nothing_was_lost(run, monkeypatch):
    import whisperport.apps.cli.doctor

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(whisperport.apps.cli.doctor, "examine", interrupt)

    ran = run("doctor")

    assert (ran.code, ran.out) == (130, "")
    assert ran.err == "interrupted: nothing was left half-written\n"
    assert "Traceback" not in ran.err


def test_an_error_is_shown_as_what_why_and_hint(run, monkeypatch):
    # given: text that rich would read as markup, and a line longer than any terminal
    import whisperport.apps.cli.doctor

    def fail():
        raise WhisperportError("[red]what", why="why " * 60 + "[0]", hint='pip install "x[y]"')

    monkeypatch.setattr(whisperport.apps.cli.doctor, "examine", fail)

    ran = run("doctor")

    assert ran.lines == [
        "error: [red]what",
        f"  why: {'why ' * 60}[0]",
        "",
        'hint: pip install "x[y]"',
    ]


def test_a_mistake_of_ours_is_not_dressed_as_the_user_s(run, monkeypatch):
    import whisperport.apps.cli.doctor

    monkeypatch.setattr(whisperport.apps.cli.doctor, "examine", lambda: 1 / 0)

    ran = run("doctor")
    monkeypatch.setenv("WHISPERPORT_TRACEBACK", "1")
    in_full = run("doctor")

    assert (ran.code, ran.out) == (1, "")
    assert ran.lines[:2] == [
        "error: whisperport failed with an unexpected error",
        "  why: ZeroDivisionError: division by zero",
    ]
    assert "this is a defect: please report it" in ran.lines[-1]
    assert "Traceback" not in ran.err
    assert "Traceback (most recent call last):" in in_full.lines


def test_transcribe_of_chunks_says_what_it_cannot_do_with_them(run, bundle, wav):
    chunks = ("transcribe", wav, "--bundle", bundle, "--language", "en", "--vad")

    plain, conditioned = run(*chunks), run(*chunks, "--condition-on-previous-text")
    clipped, without = run(*chunks, "--clip-timestamps", "0,1"), run(*chunks[:-1], "--workers", 2)
    packed = run(*chunks[:-1], "--pack")

    assert (plain.code, conditioned.code) == (0, 0)
    assert "warning" not in plain.err
    assert (
        "warning: with --vad, the previous text is used as a prompt within its own chunk"
        in conditioned.err
    )
    assert "error: `clip_timestamps` and `vad` cannot be used together" in clipped.err
    assert "error: `workers` above 1 requires `vad` or several audio files" in without.err
    assert "error: `--pack` requires `--vad`" in packed.err
    assert 0 not in (clipped.code, without.code, packed.code)


# `whisperport verify --each-program`, on a provider that is installed here.

AZURE = "onnxruntime.provider=AzureExecutionProvider"  # ONNX Runtime's wheel has it
SMALL = "onnxruntime.provider-programs=cross_kv"


def test_a_provider_without_nodes_is_shown_and_the_status_is_1(run):
    options = ("--run-option", AZURE, "--run-option", SMALL)
    ran = run("verify", default_bundle(), "--each-program", *options)
    as_json = run("verify", default_bundle(), "--each-program", *options, "--json")

    assert ran.code == as_json.code == 1
    assert "cross_kv  all nodes declined  0            24" in ran.out
    assert "cross_kv, not on the provider: 12 Reshape, 6 Transpose" in ran.out
    assert "recommended: run all programs on the CPU" in ran.out
    assert "opset: 20; whisperport knows no limit" in ran.out
    assert all(len(line) <= 100 for line in ran.out.splitlines())
    assert "next:" not in ran.err
    found = json.loads(as_json.out)
    assert not found["usable"]
    assert found["trials"][0]["sqnr_db"] == "inf"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("onnxruntime.provider=Nothing",), 1, "no execution provider `Nothing`"),
        ((SMALL,), 1, "no execution provider is named"),
        ((AZURE, "onnxruntime.provider-options=x"), 1, "is not NAME=VALUE"),
        ((AZURE, "onnxruntime.provider-programs=x"), 1, "names `x`"),
    ],
)
def test_wrong_usage(run, arguments, code, message):
    options = [word for one in arguments for word in ("--run-option", one)]
    ran = run("verify", default_bundle(), "--each-program", *options)

    assert ran.code == code
    assert message in ran.err
    assert ran.out == ""


def test_it_records_no_evidence(run):
    ran = run("verify", default_bundle(), "--each-program", "--record", "--run-option", AZURE)

    assert ran.code == 2
    assert "--each-program cannot be used with --record" in ran.err


def test_a_mix_is_named_with_what_its_words_cost() -> None:
    # Given the manifest of a bundle whose report has a check of short windows, too
    manifest = Bundle.open(default_bundle()).manifest
    checks = [check for check in manifest.verification["checks"] if check["level"] == "words"]
    assert [check["what"] for check in checks] == ["word error rate", "short windows"]
    # When the line for a mix is made of it
    # Then it has the targets and precisions, and the bound of the error rate once
    assert mix_words(manifest) == (
        "onnxruntime fp32, verified: +0.00 points of WER over float32, at most 5.45 with 95%"
    )


# Run options are printed with the result, and kept in the suggested next command.

PROVIDER = "onnxruntime.provider=CPUExecutionProvider"


def test_a_verdict_says_how_the_programs_were_run(run, bundle):
    ran = run("verify", bundle, "--run-option", PROVIDER)

    assert ran.out.splitlines()[-1] == f"{bundle}: verified ({PROVIDER})"
    assert ran.lines[-1].endswith(f"--bundle {bundle} --run-option {PROVIDER}")


def test_the_next_transcription_is_run_the_same_way(run, bundle, wav, tmp_path):
    phrases = tmp_path / "names.txt"
    phrases.write_text("Anna")
    same = ("--run-option", PROVIDER, "--phrases", phrases)

    ran = run("transcribe", wav, "--bundle", bundle, *same, "--language", "en")

    assert ran.lines[-1] == (
        f"next: whisperport transcribe {wav} --bundle {bundle} --run-option {PROVIDER} "
        f"--phrases {phrases} --output-format srt"
    )
