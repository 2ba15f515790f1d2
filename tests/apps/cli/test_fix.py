"""`whisperport fix`: what it prints, what it writes, and what it does not change."""

import json
import re

import numpy as np
import pytest
import torch

from whisperport.model.trace.program import trace


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A program like the end of openai-whisper's decoder: a norm, and a matmul with the embedding table."""

    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(8)
            self.table = torch.nn.Embedding(50, 8)

        def forward(self, x):
            return self.norm(x) @ self.table.weight.t()

    path = tmp_path_factory.mktemp("programs") / "head.pt2"
    torch.export.save(trace("head", Head(), (torch.zeros(1, 4, 8),)).exported, path)
    return path


def test_what_was_fixed_is_written_and_checked(run, head, tmp_path):
    out = tmp_path / "fixed.pt2"

    ran = run("fix", head, "--target", "xnnpack", "--out", out)

    assert ran.code == 0
    assert ran.out.splitlines()[-1] == f"{out}: 2 nodes replaced; xnnpack rejects no node"
    assert ran.lines[-1].startswith(f"next: whisperport lower {out} --target xnnpack --out ")
    assert run("check", out, "--target", "xnnpack").code == 0


def test_what_a_rewrite_did_not_replace_is_no_remaining_problem_of_a_fixed_program(
    run, head, tmp_path
):
    ran = run("fix", head, "--target", "xnnpack", "--out", tmp_path / "fixed.pt2")

    assert "remaining problem" not in ran.out
    (row,) = [line for line in ran.out.splitlines() if line.startswith("fold-constants  t ")]
    assert "the constant is a transposed stored weight" in row
    assert "xnnpack rejects none of these nodes: they need no change" in ran.out


def test_a_remaining_problem_names_module_and_line(run, tmp_path):
    module = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.LayerNorm(8))
    path = tmp_path / "lookup.pt2"
    torch.export.save(trace("lookup", module, (torch.arange(4)[None],)).exported, path)

    ran = run("fix", path, "--target", "xnnpack", "--out", tmp_path / "fixed.pt2")

    assert ran.code == 0  # a lookup computes nothing
    assert re.search(r"also stored for the host \(0,\s+torch/nn/", ran.out)


def test_json_says_what_was_done(run, head, tmp_path):
    out = tmp_path / "fixed.pt2"

    report = json.loads(run("fix", head, "--target", "xnnpack", "--out", out, "--json").out)

    assert report["written"] == str(out)
    assert report["changed_nodes"] == 2
    assert report["remaining"] == []
    kept = {one["rewrite"] for one in report["rewrites"] if one["kept"]}
    assert kept == {"matmul-by-linear", "layer-norm-by-linear"}


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_the_program_itself_is_not_overwritten(run, head, overwrite):
    before = head.read_bytes()

    ran = run("fix", head, "--target", "xnnpack", "--out", head, *overwrite)

    assert ran.code == 1
    assert "it is the input" in ran.err
    assert head.read_bytes() == before


def test_a_fixed_program_has_nothing_to_fix(run, head, tmp_path):
    once, twice = tmp_path / "once.pt2", tmp_path / "twice.pt2"
    run("fix", head, "--target", "xnnpack", "--out", once)

    ran = run("fix", once, "--target", "xnnpack", "--out", twice)

    assert ran.code == 0
    assert "nothing to fix" in ran.out
    assert not twice.exists()


def test_without_a_file_to_write_nothing_is_fixed(run, head):
    ran = run("fix", head, "--target", "xnnpack")

    assert ran.code == 2
    assert "--out" in ran.err


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and nothing", b"\x08\x07onnx"])
def test_a_file_that_is_not_a_program_is_an_error_and_nothing_is_written(run, tmp_path, content):
    (tmp_path / "a.pt2").write_bytes(content)

    ran = run("fix", tmp_path / "a.pt2", "--target", "xnnpack", "--out", tmp_path / "b")

    assert ran.code == 1
    assert "error: " in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt2"]


def test_a_file_of_the_hosts_does_not_replace_given_inputs(run, tmp_path):
    module = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.LayerNorm(8))
    program = trace("lookup", module, (torch.arange(4)[None],))
    path, inputs = tmp_path / "lookup.pt2", tmp_path / "fixed.host.json"
    torch.export.save(program.exported, path)
    with inputs.open("wb") as file:
        np.savez(file, **{program.spec.inputs[0].name: np.arange(4)[None]})
    before = inputs.read_bytes()

    arguments = ("--target", "hailo8l", "--out", tmp_path / "fixed.pt2", "--overwrite")
    ran = run("fix", path, *arguments, "--inputs", inputs)

    assert ran.code == 1
    assert "it is the input" in ran.err
    assert inputs.read_bytes() == before
