"""`whisperport compile FILE` from the shell."""

import json
import re

import pytest

from whisperport import targets

from ...build.compile.third_party_onnx import decoder_file, write_calls
from ...dummy_vendor.listed import WITH_DUMMY, interpreter
from .test_errors import assert_error


@pytest.fixture(autouse=True)
def listed(monkeypatch):
    monkeypatch.setattr(targets, "TARGETS", WITH_DUMMY)


def test_compile_says_what_was_compiled_and_how_near_its_outputs_are(run, tmp_path):
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


def test_compile_without_inputs_says_which_are_needed(run, tmp_path):
    decoder = decoder_file(tmp_path / "decoder.onnx")

    ran = run("compile", decoder, "-t", "dummy1")

    assert_error(ran, "cannot be compiled without samples of its inputs")
    assert "features float32[1, 6, 8]" in ran.err
    assert [path.name for path in tmp_path.iterdir() if path != decoder] == []
