"""`whisperport verify --each-program`, on a provider that is installed here."""

import json

import pytest

from ...embedded import default_bundle

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
