"""`whisperport compile` and `import` from the shell, with fakes of vendors' compilers and devices."""

import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from whisperport import targets
from whisperport.errors import LoweringError

from ...dummy_vendor.listed import WITH_DUMMY, interpreter
from ...targets.vendors.hailo.fake_sdk import InstalledSdk
from ...targets.vendors.hailo.hef_file import encoder_hef
from .test_errors import assert_error

FEW = ("--option", "hailo8l.finetune=off")


@pytest.fixture
def hailo_bundle(exported, tmp_path):
    return shutil.copytree(exported("hailo8l").folder, tmp_path / "bundle")


def test_without_the_sdk_compile_says_what_was_made_and_what_was_not_done(
    run, hailo_bundle, wav, tmp_path
):
    sdk = InstalledSdk(tmp_path / "sdk", {"encoder": encoder_hef(3)})
    arguments = ("compile", hailo_bundle, "--calibration", wav, "--force", *FEW)
    arguments += ("--toolchain", f"hailo={sdk.interpreter}")

    ran = run(*arguments)
    in_json = run(*arguments, "--json")

    assert ran.code == 0
    assert ran.out.splitlines()[0].split() == [
        "program",
        "target",
        "MB",
        "compiler",
        "calibration",
    ]
    assert ran.out.splitlines()[1].split() == [
        "encoder",
        "hailo8l",
        "0.0",
        "3.31.0",
        "3",
        "samples",
    ]
    assert ran.out.endswith(f"{hailo_bundle}: compiled\n")
    assert "encoder, quantized, run by the vendor's emulator:" in ran.out.splitlines()
    assert re.search(r"arrays +encoder +.*, emulated +SQNR [2-5][0-9] dB,.* pass", ran.out)
    assert "encoder: the compiler measured 9.179 dB SNR at layer encoder/output_layer1" in ran.err
    assert "the compiled files of encoder were not run" in ran.err
    assert ran.lines[-1] == f"next: whisperport transcribe talk.mp3 --bundle {hailo_bundle}"
    (program,) = json.loads(in_json.out)
    assert program["file"] == "hailo8l/encoder.hef"
    assert all(check["passed"] for check in program["emulation"])
    assert program["emulation"][0]["value"]["sqnr_db"] > 20


def test_an_option_that_is_given_twice_is_rejected(run, hailo_bundle):
    ran = run("compile", hailo_bundle, *FEW, *FEW)
    assert ran.code == 2
    assert "for --option: `hailo8l.finetune` is given twice" in ran.err


def test_import_says_what_was_not_done(run, exported, tmp_path, monkeypatch):
    # given: the export itself has tests of its own, and takes seconds
    given = []
    manifest = exported("hailo8l").manifest
    not_run = [
        replace(e, evidence=()) if e.spec.name == "encoder" else e for e in manifest.programs
    ]
    made = SimpleNamespace(manifest=replace(manifest, programs=tuple(not_run)))
    monkeypatch.setattr(
        "whisperport.apps.cli.import_.run_import",
        lambda *arguments: given.append(arguments) or made,
    )
    out = tmp_path / "bundle"

    ran = run("import", "a.hef", "--checkpoint", "tiny", "-o", out, "-t", "hailo8")

    assert ran.code == 0
    assert given[0][1:3] == ("tiny", out)
    assert given[0][3].target == "hailo8"
    assert ran.out.endswith(f"{out}: imported\n")
    assert "the compiled files of encoder were not run" in ran.err


def test_an_import_that_is_killed_leaves_no_hidden_bundle_beside_its_output(
    run, tmp_path, monkeypatch
):
    from whisperport.apps.cli import watchdog

    (tmp_path / "encoder.hef").write_bytes(b"hello")
    (tmp_path / ".bundle.import.partial-0123456789abcdef").mkdir()

    def killed(child, *_):
        child.process.kill()
        raise LoweringError("the system killed the exporter")

    monkeypatch.setattr("whisperport.apps.cli.import_.run_watched", watchdog.run_watched)
    monkeypatch.setattr(watchdog, "_result", killed)
    ran = run(
        *("import", str(tmp_path / "encoder.hef"), "--checkpoint", "tiny"),
        *("--out", str(tmp_path / "bundle")),
    )

    assert ran.code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["encoder.hef"]


@pytest.fixture
def with_dummy(monkeypatch):
    monkeypatch.setattr(targets, "TARGETS", WITH_DUMMY)


@pytest.mark.usefixtures("with_dummy")
def test_compile_says_what_was_compiled_and_how_near_its_outputs_are(run, tmp_path):
    pytest.importorskip("torch")
    from ...build.compile.test_compile_file import decoder_file, write_calls  # needs onnx

    decoder, out = decoder_file(tmp_path / "decoder.onnx"), tmp_path / "made"
    calls = write_calls(tmp_path / "calls")
    arguments = ["compile", decoder, "-t", "dummy1", "--inputs", calls, "-o"]
    options = ["--force", "--toolchain", f"dummy={interpreter(tmp_path)}"]

    ran = run(*arguments, out, *options)
    in_json = run(*arguments, tmp_path / "again", *options, "--json")

    assert ran.code == 0
    assert re.search(r"^decoder +dummy1 +0\.0 +2\.1 +3 samples$", ran.out, re.MULTILINE)
    assert "decoder, compiled, run by the vendor's simulator:" in ran.out.splitlines()
    row = r"^arrays +decoder +logits_1, simulated, worst of 3: [abc]\S* +SQNR \d+ dB, max error .* pass$"
    assert re.search(row, ran.out, re.MULTILINE)
    assert ran.out.endswith(f"{out}: compiled\n")
    (program,) = json.loads(in_json.out)
    assert program["ran"] == "simulated"
    assert [check["passed"] for check in program["emulation"]] == [True, True]


@pytest.mark.usefixtures("with_dummy")
def test_compile_without_inputs_says_which_are_needed(run, tmp_path):
    pytest.importorskip("torch")
    from ...build.compile.test_compile_file import decoder_file  # needs onnx

    decoder = decoder_file(tmp_path / "decoder.onnx")

    ran = run("compile", decoder, "-t", "dummy1")

    assert_error(ran, "cannot be compiled without samples of its inputs")
    assert "features float32[1, 6, 8]" in ran.err
    assert [path.name for path in tmp_path.iterdir() if path != decoder] == []
