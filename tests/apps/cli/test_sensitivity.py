"""`whisperport sensitivity`: files, checkpoints, damaged and hostile programs."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from whisperport.apps.cli.main import cli
from whisperport.model.trace.onnx_file import write_onnx_file
from whisperport.model.trace.program import Program, trace


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).eval()
    with torch.no_grad():
        module[0].weight[3] *= 2000
    return trace("some", module, (torch.zeros(1, 6, 8),), ["y"])


@pytest.fixture
def inputs(program: Program, tmp_path: Path) -> Path:
    """Two samples of the program's input."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    (name,) = (tensor.name for tensor in program.spec.inputs)
    for seed in range(2):
        values = np.random.default_rng(seed).standard_normal((1, 6, 8)).astype(np.float32)
        np.savez(folder / f"{seed}.npz", **{name: values})
    return folder


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["sensitivity", *map(str, arguments)], catch_exceptions=True)
    return result.exit_code, result.output + str(result.exception or "")


def test_a_file_is_measured_in_a_child_process_and_the_worst_is_first(
    program: Program, inputs: Path, tmp_path: Path
) -> None:
    path = tmp_path / "some.onnx"
    write_onnx_file(program, path)

    status, text = run(path, "--inputs", inputs, "--top", "2")

    lines = text.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("activation"))
    assert status == 0
    assert {line.split("  ")[0] for line in lines[header + 1 : header + 3]} == {"0", "Gelu of 0"}
    assert "0: channel 3 reaches " in text
    assert "one 8-bit scale ruins " in text
    assert all(len(line) <= 100 for line in lines if not line.startswith("next: "))


def test_json_has_every_activation(program: Program, inputs: Path, tmp_path: Path) -> None:
    path = tmp_path / "some.onnx"
    write_onnx_file(program, path)

    status, text = run(path, "--inputs", inputs, "--json")

    rows = json.loads(text[text.index("{") :])["activations"]
    assert status == 0
    assert [row["typical_db"] for row in rows] == sorted(row["typical_db"] for row in rows)
    assert {row["activation"] for row in rows} == {"0", "Gelu of 0", "2"}
    assert all(row["alone_db"] is not None for row in rows)


def test_a_program_without_a_spectrogram_needs_inputs(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "some.onnx"
    write_onnx_file(program, path)

    status, text = run(path)

    assert status == 1
    assert "reads no spectrogram" in text


@pytest.mark.parametrize("content", [b"", b"ONNX", bytes(range(256)) * 40])
def test_a_damaged_file_is_an_error_of_its_own(
    content: bytes, inputs: Path, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.onnx"
    path.write_bytes(content)

    status, text = run(path, "--inputs", inputs)

    assert status == 1
    assert "damaged.onnx" in text
    assert "unexpected" not in text


def test_a_missing_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    status, text = run(tmp_path / "absent.onnx")

    assert status == 1
    assert "absent.onnx" in text


def test_the_page_shows_the_channel_and_contains_no_markup_of_the_file(
    program: Program, inputs: Path, tmp_path: Path
) -> None:
    path = tmp_path / "<script>.onnx"
    write_onnx_file(program, path)
    page = tmp_path / "page.html"

    status, _ = run(path, "--inputs", inputs, "--html", page)

    text = page.read_text()
    assert status == 0
    assert "<script" not in text
    assert "&lt;script&gt;.onnx" in text
    assert "channel 3 reaches " in text
    assert text.count('class="bar bad"') == text.count("<figure>") == text.count("<svg") > 0
    assert re.search(r"<td>0<br>.*channel 3<.*1 × 6 × 8", text)
    assert "whisperport compile" in text
    assert "--target NAME --precision w8a16" in text


def test_errors_name_the_file_that_was_given(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "some.pt2"
    torch.export.save(program.exported, path)

    status, text = run(path)

    assert status != 0
    assert "some.pt2 reads no spectrogram" in text
    assert ".onnx" not in text
