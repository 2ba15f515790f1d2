"""Errors of the command line, and the commands that it suggests."""

import builtins
import errno
import json
import logging
import re
from pathlib import Path

import pytest

from whisperport.apps.cli.main import _WarningPrinter
from whisperport.build.plan import PlanOptions, plan
from whisperport.program.bundle import Bundle
from whisperport.system import child
from whisperport.system.progress import begin_stage
from whisperport.targets import TARGETS

from ...embedded import default_bundle

# What cannot be done: exit code 1, what, why and what to do on stderr, and nothing on stdout.


def assert_error(ran, says):
    """An error in its form, and no traceback."""
    assert (ran.code, ran.out) == (1, "")
    assert ran.lines[0].startswith("error: ")
    assert says in ran.err
    assert "Traceback" not in ran.err
    for line in ran.lines[1:]:
        assert line.startswith(("  why: ", "hint: ")) or not line


def replace(file: Path, data: bytes) -> None:
    """Not written in place: the file is a link to one that other tests read."""
    file.unlink()
    file.write_bytes(data)


def edited(manifest: Path, change) -> None:
    """Change a manifest, and make its checksum fit, as a careful forger would."""
    from whisperport.program.bundle.manifest import _checksum

    data = json.loads(manifest.read_bytes())
    del data["checksum"]
    change(data)
    data["checksum"] = _checksum(data)
    replace(manifest, json.dumps(data).encode())


@pytest.mark.needs("torch")
def test_a_window_that_the_checkpoint_does_not_support_is_rejected(run, tmp_path):
    out = tmp_path / "out"
    ran = run("export", "default", "--target", "onnxruntime", "--window", "31", "--out", out)

    # The checkpoint was read before: what it says is on stderr.
    assert (ran.code, ran.out) == (1, "")
    assert "expected 1 to 30 s" in ran.err
    assert "Traceback" not in ran.err
    assert not out.exists()


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    "chosen", [("toaster",), ("onnxruntime", "--placement", "encoder=toaster")], ids=len
)
def test_an_unknown_target_is_rejected_with_those_there_are(run, tmp_path, chosen):
    ran = run("export", "default", "--target", *chosen, "--out", tmp_path / "out")

    assert_error(ran, "there is no target `toaster`")
    assert ran.lines[-1] == f"hint: targets are {', '.join(target.spec.name for target in TARGETS)}"
    assert not (tmp_path / "out").exists()


@pytest.mark.needs("torch")
def test_a_missing_checkpoint_is_rejected_with_near_names(run, tmp_path):
    ran = run("export", "tiny.eng", "--target", "onnxruntime", "--out", tmp_path / "out")

    assert_error(ran, "no checkpoint `tiny.eng`")
    assert "tiny.en" in ran.lines[-1]


def test_a_missing_audio_file_is_rejected(run, bundle):
    assert_error(
        run("transcribe", "no-such.wav", "--bundle", bundle), "`no-such.wav` does not exist"
    )


def test_a_file_without_audio_is_rejected(run, bundle):
    ran = run("transcribe", __file__, "--bundle", bundle)

    assert_error(ran, "is not an audio file")
    assert 'it is a text, which begins with `"""' in ran.err


def test_standard_input_without_audio_is_rejected(run, bundle):
    assert_error(run("transcribe", "-", "--bundle", bundle, stdin=b""), "standard input")


@pytest.mark.parametrize(
    ("language", "says"),
    [
        ("Cantonese", "this checkpoint has no language `yue`"),  # large-v3 has it
        ("Germann", "did you mean german"),
    ],
)
def test_a_language_that_the_checkpoint_lacks_is_rejected(run, bundle, wav, language, says):
    assert_error(run("transcribe", wav, "--bundle", bundle, "--language", language), says)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (("--language", "de"), "this checkpoint cannot transcribe `de`"),
        (("--task", "translate"), "this checkpoint cannot translate `en`"),
    ],
)
def test_the_embedded_model_is_not_asked_for_what_it_does_not_understand(run, wav, option, says):
    assert_error(run("transcribe", wav, "--bundle", default_bundle(), *option), says)

    by_name = run("transcribe", wav, "--model", "default", *option)

    assert by_name.code != 0
    assert by_name.lines[0].startswith("note: the model `default`")
    assert by_name.lines[1].startswith(f"error: {says}")


def test_a_missing_bundle_is_rejected(run, tmp_path, wav):
    for verb in (("verify",), ("transcribe", wav, "--bundle")):
        assert_error(run(*verb, tmp_path / "none"), "there is no bundle at")


def test_one_byte_changed_is_found(run, copied_bundle):
    name = "onnxruntime/step.onnx"
    file = copied_bundle / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    replace(file, bytes(data))

    ran = run("verify", copied_bundle)

    assert_error(ran, f"{name} in bundle {copied_bundle} is damaged")
    assert "SHA-256" in ran.lines[1]


def test_a_bundle_that_was_never_run_is_recorded_where_it_runs(run, copied_bundle):
    def forget(data):
        for program in data["programs"]:
            program["evidence"] = []

    edited(copied_bundle / "manifest.json", forget)
    assert not Bundle.open(copied_bundle).manifest.verified

    ran = run("verify", copied_bundle, "--record")

    assert ran.code == 0
    assert f"recorded in {copied_bundle}: verified" in ran.lines
    assert "allow-unverified" not in ran.err
    assert Bundle.open(copied_bundle).manifest.verified


def test_a_bundle_that_failed_its_verification_says_so_permanently(run, copied_bundle, wav):
    edited(copied_bundle / "manifest.json", lambda data: data["verification"].update(passed=False))

    ran = run("verify", copied_bundle)

    assert ran.code == 0  # it agrees with its reference all the same
    assert (
        "warning: this bundle failed its verification at export; it was written with --allow-unverified"
        in ran.lines
    )


def test_a_folder_that_cannot_be_written_is_rejected(run, tmp_path):
    # given: a folder below a file, which not even root can make
    (tmp_path / "file").write_text("")

    ran = run("export", "default", "-t", "onnxruntime", "-o", tmp_path / "file" / "out")

    assert_error(ran, "cannot write")


@pytest.mark.needs("torch")
@pytest.mark.parametrize("opset", ["12", "21", "newest"])
def test_an_opset_that_is_not_written_is_wrong_usage(run, tmp_path, opset):
    ran = run(
        "export",
        "default",
        "-t",
        "onnxruntime",
        "--option",
        f"onnxruntime.opset={opset}",
        "-o",
        tmp_path / "out",
    )

    assert_error(ran, f"the option `onnxruntime.opset` cannot be `{opset}`")


@pytest.mark.parametrize(
    ("command", "says", "says_of_checkpoint"),
    [
        (
            "verify",
            "export CHECKPOINT --target NAME --out DIR",
            "export {} --target NAME --out DIR",
        ),
        ("bench", "export CHECKPOINT --target NAME --out DIR", "--model {}"),
    ],
)
def test_the_command_for_a_missing_bundle_is_complete(
    run, tmp_path, command, says, says_of_checkpoint
):
    folder = tmp_path / "bundle"

    missing = run(command, folder)
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    checkpoint = run(command, folder)

    assert says in missing.lines[-1]
    assert says_of_checkpoint.format(folder) in checkpoint.lines[-1]


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    "command",
    [("export", "-t", "onnxruntime", "-o", "out"), ("check", "-t", "xnnpack")],
    ids=lambda command: command[0],
)
def test_a_compiled_program_is_sent_to_inspect_and_nowhere_else(run, tmp_path, command):
    verb, *options = command
    program = tmp_path / "decoder.pte"
    program.write_bytes(b"\0\0\0\0ET12" + bytes(50))

    ran = run(verb, program, *options)

    assert_error(ran, f"whisperport inspect {program}")
    assert "whisperport check" not in ran.err
    assert "whisperport export" not in ran.err


# Command lines that do not say what to do: exit code 2, and which help to read.


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sing"], "no such command 'sing'"),
        (["--loud"], "no such option '--loud'"),
        (["export"], "missing argument 'CHECKPOINT'"),
        (["export", "default"], "missing option '--target' / '-t'"),
        (["export", "default", "--out", "x"], "`--target onnxruntime` runs on any CPU"),
        (["verify"], "missing argument 'BUNDLE'"),
        (["transcribe"], "missing argument 'AUDIO'"),
        (["transcribe", "a.wav", "--threads", "0"], "0 is not in the range 1 to 1024"),
        (["transcribe", "a.wav", "--task", "sing"], "'sing' is not one of"),
        (["transcribe", "a.wav", "--run-option", "fast"], "expected NAME=VALUE, got 'fast'"),
        (["verify", "a", "b"], "got unexpected extra argument"),
    ],
)
def test_wrong_usage_exits_2_and_names_the_help(run, arguments, says):
    ran = run(*arguments)

    assert (ran.code, ran.out) == (2, "")
    assert ran.lines[0].startswith("error: ")
    assert says in ran.lines[0]
    assert ran.lines[1].startswith("  usage: whisperport ")
    assert ran.lines[-1].startswith("hint: whisperport ")
    assert ran.lines[-1].endswith("--help")


def test_version_is_the_package_s(run):
    from whisperport import __version__

    ran = run("--version")

    assert (ran.code, ran.out) == (0, f"whisperport, version {__version__}\n")


# The command that a verb suggests at its end is safe: it replaces nothing, and does not lead back.


def test_check_of_a_bundle_suggests_nothing_that_replaces_it(run):
    ran = run("check", default_bundle(), "--target", "onnxruntime")

    assert ran.lines[-1] == f"next: whisperport verify {default_bundle()}"


@pytest.mark.needs("torch")
def test_targets_with_a_device_are_not_said_to_run(run):
    rows = [line.split("  ") for line in run("targets").out.splitlines()]

    last = {row[0]: row[-1].strip() for row in reversed(rows) if row[0] in ("rk3588", "xnnpack")}

    assert last["rk3588"] in ("emulated", "no: [rockchip]")
    assert last["xnnpack"] == "yes"


def test_an_occupied_folder_is_rejected_before_a_process_starts(run, tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.setattr("whisperport.apps.cli.export.run_watched", lambda *_, **__: 1 / 0)

    ran = run("export", "default", "--target", "onnxruntime", "--out", tmp_path)

    assert ran.code == 1
    assert "ZeroDivisionError" not in ran.err
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("vocabulary", "following"),
    [
        (51865, "next: whisperport export CHECKPOINT --target aws-neuron --out DIR"),
        (50, "next: whisperport explain WP601"),
    ],
)
def test_a_decoder_that_projects_audio_again_is_replaced_and_not_lowered(
    run, tmp_path, vocabulary, following
):
    # given the decoder of openai-whisper, with Whisper's vocabulary or another one
    import torch
    from whisper.model import TextDecoder

    decoder = TextDecoder(vocabulary, 16, 16, 2, 1).eval()
    inputs = (torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 1500, 16))
    path = tmp_path / "naive.pt2"
    torch.export.save(torch.export.export(decoder, inputs), path)

    # when a target that rejects none of its nodes checks it
    ran = run("check", path, "--target", "aws-neuron")

    # then the warning has no exit status, and the next command solves what was found
    assert ran.code == 0
    assert re.search(r"^WP601 .* split \(`export`\)$", ran.out, re.MULTILINE)
    assert re.search(r"; [\d.]+% of the FLOPs repeat for every token \(WP601\)$", ran.out, re.M)
    assert ran.lines[-1] == following


# `whisperport plan`


def test_the_table_has_every_machine_and_says_that_it_is_an_estimate(run, bundle):
    ran = run("plan", bundle, "--target", "aws-neuron")

    assert ran.code == 0
    assert "an estimate, nothing was run" in ran.out.splitlines()[0]
    made = plan(bundle, PlanOptions(target="aws-neuron"))
    for one in made.machines:
        (row,) = [line for line in ran.out.splitlines() if line.startswith(one.machine + " ")]
        assert f"≥ {one.token_s * 1e3:.2f} ms" in row
        assert row.count("GB") == 3
    assert "limited by" in ran.out
    assert "padding" not in ran.out


def test_the_options_are_those_of_the_function(run, bundle):
    ran = run(
        "plan",
        bundle,
        "--target",
        "aws-neuron",
        "--batch",
        4,
        "--precision",
        "bf16",
        "--tensor-parallel",
        3,
        "--json",
    )

    options = PlanOptions(target="aws-neuron", batch=4, precision="bf16", tensor_parallel=3)
    assert json.loads(ran.out) == json.loads(json.dumps(plan(bundle, options).to_json()))


def test_heads_that_are_padding_are_stated(run, bundle):
    ran = run("plan", bundle, "--target", "aws-neuron", "--tensor-parallel", 16)

    assert "heads are padding" in ran.out
    assert "compiles a program for one core" in ran.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "onnxruntime"), "no estimate for the target `onnxruntime`"),
        (("--precision", "fp16"), "no estimate for the precision `fp16`"),
    ],
)
def test_what_cannot_be_estimated_is_an_error(arguments, words, run, bundle):
    ran = run("plan", bundle, "--target", "aws-neuron", *arguments)

    assert ran.code == 1
    assert words in ran.err
    assert ran.out == ""


def test_the_exit_status_is_1_if_the_model_fits_no_machine(run, bundle):
    ran = run("plan", bundle, "--target", "aws-neuron", "--tensor-parallel", 1024)

    assert ran.code == 1


def test_a_warning_that_cannot_be_printed_does_not_stop_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def print_warning(_: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(_WarningPrinter.emit.__globals__, "print_warning", print_warning)

    _WarningPrinter(logging.WARNING).handle(
        logging.makeLogRecord({"levelno": logging.WARNING, "msg": "a warning"})
    )


def test_a_log_that_cannot_be_written_does_not_stop_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages: list[str] = []

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(builtins, "print", full)
    request = {"pickled": child.pickled((begin_stage, ("lowering",)))}

    child._run(request, lambda **message: stages.append(message["stage"]))  # type: ignore[arg-type]

    assert stages == ["lowering"]
