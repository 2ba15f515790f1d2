"""`whisperport compile`, `import` and `lower` from the shell, with fakes of compilers and devices."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from whisperport import targets
from whisperport.errors import BundleError, LoweringError
from whisperport.runtime.engine import trial

from ...dummy_vendor.listed import WITH_DUMMY, interpreter
from ...edited_bundles import foreign_bundle
from ...extent import core_or_all
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


# `whisperport lower`: a third-party program


@pytest.fixture(scope="module")
def pt2(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("program") / "stem.pt2"
    module = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6)).eval()
    torch.export.save(torch.export.export(module, (torch.zeros(1, 3, 4),), strict=False), path)
    return path


def test_lower_says_what_was_written_and_how_near_it_is(run, pt2, tmp_path):
    out = tmp_path / "stem.onnx"

    ran = run("lower", pt2, "-t", "onnxruntime", "--opset", 14, "-o", out)
    in_json = run("lower", pt2, "-t", "onnxruntime", "--simplify", "-o", out, "--json")

    assert ran.code == 0
    assert re.search(r"^opset +14$", ran.out, re.MULTILINE)
    assert re.search(r"^min cosine +1\.000000 \(limit 0\.99999\)$", ran.out, re.MULTILINE)
    assert re.search(r"^min SQNR +\d+\.\d dB \(limit 60 dB\)$", ran.out, re.MULTILINE)
    assert re.search(
        r"^max error +\d\.\de-\d\d of the largest value \(limit 0\.0001\)$", ran.out, re.MULTILINE
    )
    assert ran.out.endswith(f"{out}: equal\n")
    assert ran.lines[-1] == f"next: whisperport inspect {out}"
    assert json.loads(in_json.out)["opset"] == 20


@pytest.mark.parametrize("data", [b"", b"hello", b"PK\x05\x06" + bytes(18)])
def test_what_is_no_program_is_rejected(run, tmp_path, data):
    (tmp_path / "p.pt2").write_bytes(data)

    ran = run("lower", tmp_path / "p.pt2", "-t", "onnxruntime", "-o", tmp_path / "p.onnx")

    assert_error(ran, "is not a program saved by torch.export")
    assert os.listdir(tmp_path) == ["p.pt2"]


@pytest.mark.parametrize("opset", [12, 21])
def test_an_opset_that_is_not_written_is_wrong_usage(run, pt2, opset):
    ran = run("lower", pt2, "-t", "onnxruntime", "--opset", opset, "-o", "p.onnx")

    assert ran.code == 2
    assert f"{opset} is not in the range 13 to 20" in ran.err


class Logits(nn.Module):
    """Hugging Face's decoder as its users export it: the vocabulary's weights are tied."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.decoder, self.proj_out = model.model.decoder, model.proj_out

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        out = self.decoder(input_ids=tokens, encoder_hidden_states=features, use_cache=False)
        return self.proj_out(out.last_hidden_state)


def test_hugging_faces_decoder_at_opset_13_with_nothing_on_screen_but_progress(
    random_hf_whisper, tmp_path
):
    """A case reported from the field, at its sizes, where torch's exporters fail in a flood of text."""
    # given: eager attention, [1, 32] tokens and 10 s of sound
    model = random_hf_whisper(
        d_model=core_or_all(96, 384),
        encoder_layers=1,
        decoder_layers=core_or_all(1, 4),
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        decoder_ffn_dim=core_or_all(384, 1536),
        max_source_positions=500,
    )
    model.set_attn_implementation("eager")
    inputs = torch.zeros(1, 32, dtype=torch.long), torch.zeros(1, 500, model.config.d_model)
    exported = torch.export.export(Logits(model), inputs, strict=False)
    torch.export.save(exported, tmp_path / "decoder.pt2")
    command = ["lower", "decoder.pt2", "-t", "onnxruntime", "--opset", "13", "-o", "d.onnx"]

    # when: as the shell calls it
    done = in_processes_of_their_own(command, tmp_path)

    assert done.returncode == 0, done.stderr
    assert re.search(r"^rank +4$|^max rank +4$", done.stdout, re.MULTILINE)
    progress = re.compile(r" +\d+\.\d s  \S.*|next: whisperport .*|")
    assert [line for line in done.stderr.splitlines() if not progress.fullmatch(line)] == []
    error = re.search(r"^max error +(\S+)", done.stdout, re.MULTILINE)
    assert float(error[1]) < 1e-4
    onnx.checker.check_model(str(tmp_path / "d.onnx"), full_check=True)
    written = onnx.load(str(tmp_path / "d.onnx"))
    assert [o.version for o in written.opset_import] == [13]
    weights = {t.data_ptr(): t.numel() * 4 for t in Logits(model).parameters()}
    assert (tmp_path / "d.onnx").stat().st_size < 1.01 * sum(weights.values())
    assert sorted(os.listdir(tmp_path)) == ["d.onnx", "decoder.pt2"]


def test_a_failure_in_the_child_is_three_lines_and_a_log(tmp_path):
    # given: an operator that ONNX lacks
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.bessel_j0(x)

    program = torch.export.export(Odd(), (torch.zeros(2, 3),), strict=False)
    torch.export.save(program, tmp_path / "odd.pt2")
    command = ["lower", "odd.pt2", "-t", "onnxruntime", "-o", "odd.onnx"]

    done = in_processes_of_their_own(command, tmp_path)

    assert (done.returncode, done.stdout) == (1, "")
    lines = [line for line in done.stderr.splitlines() if line and " s  " not in line]
    assert len(lines) == 3
    assert lines[0] == "error: `odd` cannot be written as ONNX opset 20"
    assert "bessel_j0" in lines[1]
    assert lines[2].endswith(f"the complete log is in {tmp_path / 'odd.onnx.log'}")
    assert "bessel_j0" in (tmp_path / "odd.onnx.log").read_text()
    assert sorted(os.listdir(tmp_path)) == ["odd.onnx.log", "odd.pt2"]


# `--trust`: a bundle of somebody else is loaded without a trial run.


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle whose trial fails."""

    def fails(*_: Any) -> None:
        raise BundleError("the trial failed")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trial, "try_bundle", fails)
    return foreign_bundle(tmp_path / "bundle").folder


@pytest.mark.parametrize(
    "command",
    [
        ("transcribe", "WAV", "--bundle", "BUNDLE"),
        ("verify", "BUNDLE"),
        *core_or_all((), [("bench", "BUNDLE", "WAV", "--repeat", "1")]),
    ],
    ids=lambda command: command[0],
)
def test_a_bundle_of_somebody_else_is_tried_unless_it_is_trusted(
    run: Any, foreign: Path, wav: Path, command: tuple[str, ...]
) -> None:
    given = [{"WAV": wav, "BUNDLE": foreign}.get(word, word) for word in command]

    tried = run(*given)
    trusted = run(*given, "--trust", "--threads", "1")

    assert (tried.code, tried.lines[0]) == (1, "error: the trial failed")
    assert trusted.code == 0
    if command[0] == "transcribe":
        assert "--trust" in trusted.lines[-1]  # the next command can be copied


def in_processes_of_their_own(
    command: list[str], folder: Path
) -> "subprocess.CompletedProcess[str]":
    """Run a command as the shell calls it."""
    return subprocess.run(
        [sys.executable, "-c", "from whisperport.apps.cli import main; main()", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
