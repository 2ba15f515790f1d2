"""`whisperport plan`"""

import json

import pytest

from whisperport.build.plan import PlanOptions, plan


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
