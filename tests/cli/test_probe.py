"""`whisperport probe`, on providers that are installed here."""

import json

import pytest

from ..embedded import default_bundle

FALLING_BACK = ("--provider", "AzureExecutionProvider")  # ONNX Runtime's wheel has it


def test_a_provider_without_nodes_is_shown_and_the_status_is_1(run):
    # when
    ran = run("probe", default_bundle(), *FALLING_BACK, "--program", "cross_kv", "--repeat", 1)

    # then
    assert ran.code == 1
    assert "cross_kv  all nodes declined  0            24 of 24" in ran.out
    assert "cross_kv, not on the provider: 12 Reshape, 6 Transpose" in ran.out
    assert "recommended: run all programs on the CPU" in ran.out
    assert "opset: 20; the provider's documentation" in ran.out
    assert all(len(line) <= 100 for line in ran.out.splitlines())
    assert "next:" not in ran.err


def test_the_result_as_json(run):
    # when
    ran = run(
        *("probe", default_bundle(), "--provider", "CPUExecutionProvider", "--program", "cross_kv"),
        *("--repeat", 1, "--json"),
    )

    # then
    assert ran.code == 0
    found = json.loads(ran.out)
    assert found["usable"]
    assert found["attempts"][0]["sqnr_db"] == "inf"
    assert found["opsets"] == {"cross_kv": 20}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--provider", "Nothing"), 1, "no execution provider `Nothing`"),
        ((), 2, "--provider"),
        ((*FALLING_BACK, "--provider-option", "x"), 2, "expected NAME=VALUE"),
        ((*FALLING_BACK, "--program", "x"), 1, "no program `x`"),
        ((*FALLING_BACK, "--repeat", "0"), 2, "--repeat"),
        ((*FALLING_BACK, "--timeout", "0"), 2, "--timeout"),
    ],
)
def test_wrong_usage(run, arguments, code, message):
    ran = run("probe", default_bundle(), *arguments)

    assert ran.code == code
    assert message in ran.err
    assert ran.out == ""
