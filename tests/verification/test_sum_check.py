"""The sum of exponentials that a program returns is verified, singly and in a batch."""

from typing import Any

import numpy as np
import pytest

from whisperport.apps.demo import lowest_sqnr_db
from whisperport.program.signatures import LOGSUMEXP
from whisperport.runtime.engine.scores import Scores, log_sum_exp
from whisperport.targets import RunOptions
from whisperport.verification.batch_check import TOLERANCE, sum_checks
from whisperport.verification.bundle_check import verify

ONE_THREAD = RunOptions(threads=1)


def scores(error: float) -> Scores:
    row = (4 * np.random.default_rng(0).standard_normal(51_865)).astype(np.float32)
    return Scores(row, log_sum_exp(row) + error)


@pytest.mark.parametrize("error", [0.0, 0.5 * TOLERANCE, -0.5 * TOLERANCE])
def test_a_right_sum_passes(error: float) -> None:
    (check,) = sum_checks("step", "clip", [scores(0), scores(error)])

    assert check.passed
    assert check.value["sum_error"] == pytest.approx(abs(error), abs=2e-5)


@pytest.mark.parametrize("error", [2 * TOLERANCE, -2 * TOLERANCE, -30.0, 30.0])
def test_a_wrong_sum_fails(error: float) -> None:
    (check,) = sum_checks("step", "clip", [scores(0), scores(error), scores(0)])

    assert not check.passed
    assert check.reason.startswith("the largest difference is")


def test_a_nan_fails_wherever_it_is() -> None:
    for place in range(3):
        found = [scores(0) for _ in range(3)]
        found[place] = scores(float("nan"))

        (check,) = sum_checks("step", "clip", found)

        assert not check.passed


def test_a_program_without_the_output_is_not_checked() -> None:
    assert not list(sum_checks("step", "clip", [Scores(np.zeros(5, np.float32))]))


def test_the_sums_of_a_real_bundle_are_checked(
    exported: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = exported("onnxruntime", "micro", batch=2)
    of_sums = [check for check in verify(bundle, run=ONE_THREAD).checks if "sum" in check.what]
    assert {check.program for check in of_sums} == {"step", "step_2"}
    assert all(check.passed for check in of_sums)
    for entry in bundle.manifest.programs:
        has_sum = LOGSUMEXP in [output.name for output in entry.spec.outputs]
        assert has_sum == (entry.spec.name in ("step", "step_2"))

    assert (
        60 < lowest_sqnr_db(verify(bundle, run=ONE_THREAD).checks) < 300
    )  # those of the other arrays

    monkeypatch.setattr("whisperport.verification.batch_check.TOLERANCE", -1)
    report = verify(bundle, run=ONE_THREAD)

    assert {check.program for check in report.checks if not check.passed} == {"step", "step_2"}
