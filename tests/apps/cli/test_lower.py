"""`whisperport lower`: a third-party program, from the command line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

from whisperport.errors import BundleError
from whisperport.runtime.engine import trial

from ...edited_bundles import foreign_bundle
from ...extent import core_or_all
from .test_errors import assert_error

# `whisperport lower`: a third-party program, from the command line.


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

    # when: as the shell calls it, in processes of their own
    done = subprocess.run(
        [sys.executable, "-c", "from whisperport.apps.cli import main; main()", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )

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

    done = subprocess.run(
        [sys.executable, "-c", "from whisperport.apps.cli import main; main()", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )

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
