import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whisperport.verification import TOKEN_GATES, TokenGate, compare_logits, compare_tokens

FP32 = TOKEN_GATES["fp32"]
REPORT_ONLY = TokenGate(min_agreement=0, max_mean_kl=math.inf, because="a test")


def logits(seed: int = 0, shape: tuple[int, int] = (20, 100)) -> np.ndarray:
    return (5 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def test_equal_logits_pass_every_gate() -> None:
    for gate in TOKEN_GATES.values():
        result = compare_logits(logits(), logits(), gate)

        assert result
        assert result.top1_agreement == 1
        assert result.mean_kl == 0
        assert result.n_positions == 20


@pytest.mark.parametrize(
    ("actual", "expected", "reason"),
    [
        (None, logits(), "the output is missing"),
        (logits(), None, "the reference is missing"),
        (logits(shape=(0, 100)), logits(shape=(0, 100)), "expected at least"),
        (logits(shape=(3, 1)), logits(shape=(3, 1)), "expected at least"),
        (logits(shape=(3, 4)), logits(shape=(4, 4)), "expected shape (4, 4), got (3, 4)"),
        (logits().ravel(), logits(), "not a floating-point matrix"),
        (logits().astype(np.int8), logits(), "not a floating-point matrix"),
        ([[1.0, 2.0]], logits(), "not a floating-point matrix"),
    ],
)
def test_what_cannot_be_compared_fails_with_the_reason(
    actual: object, expected: object, reason: str
) -> None:
    result = compare_logits(actual, expected, REPORT_ONLY)  # type: ignore[arg-type]

    assert not result
    assert reason in result.reason
    assert math.isnan(result.mean_kl)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_a_value_that_is_not_finite_fails_on_either_side(bad: float, side: int) -> None:
    pair = [logits(), logits()]
    pair[side][2, 3] = bad

    result = compare_logits(pair[0], pair[1], REPORT_ONLY)

    assert not result
    assert ("output", "reference")[side] in result.reason


def test_only_a_flip_against_a_sure_reference_is_hard() -> None:
    expected = np.zeros((2, 4), np.float32)
    expected[0, :2] = [5.0, 4.95]  # margin 0.05
    expected[1, :2] = [5.0, 4.5]  # margin 0.5
    actual = expected.copy()
    actual[:, 1] = 5.01

    result = compare_logits(actual, expected, REPORT_ONLY)

    assert result.top1_agreement == 0
    assert result.hard_flips == 1


def test_one_hard_flip_fails_fp32_and_is_one_in_a_hundred_for_int8() -> None:
    expected = np.zeros((100, 4), np.float32)
    expected[:, 0] = 0.2
    actual = expected.copy()
    actual[7, 1] = 0.3

    fp32, int8 = (compare_logits(actual, expected, TOKEN_GATES[g]) for g in ("fp32", "w8a8"))

    assert not fp32
    assert "1 of 100 positions" in fp32.reason
    assert int8
    assert int8.worst_position == 7


def test_kl_is_that_of_the_textbook() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
    shift = np.array([[1000.0], [-1000.0]])  # logits are known up to a constant

    result = compare_logits(np.log(q) + shift, np.log(p) - shift, REPORT_ONLY)

    assert result.mean_kl == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5))


def test_a_large_divergence_fails_although_the_first_choice_agrees() -> None:
    expected = logits()

    result = compare_logits(expected * np.float32(0.5), expected, TOKEN_GATES["w8a8"])

    assert result.top1_agreement == 1
    assert not result
    assert "mean KL" in result.reason


@settings(max_examples=50)
@given(sigma=st.floats(1e-6, 1e-2), seed=st.integers(0, 99))
def test_kl_of_small_noise_is_at_most_half_its_variance(sigma: float, seed: int) -> None:
    """To second order KL is half the variance of the noise under p: the premise of the fp32 gate.

    The variance of 100 draws under a peaked p is itself random; 20 positions stay within 3 times.
    """
    expected = logits(seed).astype(np.float64)
    noise = sigma * np.random.default_rng(seed + 1).standard_normal(expected.shape)

    result = compare_logits(expected + noise, expected, REPORT_ONLY)

    assert 0 <= result.mean_kl <= 3 * sigma**2 / 2


def test_equal_tokens_pass() -> None:
    result = compare_tokens([1, 2, 3], (1, 2, 3))

    assert result
    assert result.first_difference is None
    assert result.numbers() == {"n_expected": 3, "n_actual": 3, "n_same": 3}


@pytest.mark.parametrize(
    ("actual", "expected", "side"), [([], [], "reference"), ([], [1], "output"), ([1], [], "refer")]
)
def test_empty_runs_fail(actual: list[int], expected: list[int], side: str) -> None:
    result = compare_tokens(actual, expected)

    assert not result
    assert f"the {side}" in result.reason


@pytest.mark.parametrize(
    ("actual", "first"), [([1, 9, 3], 1), ([1, 2], 2), ([1, 2, 3, 4], 3), ([9], 0)]
)
def test_the_first_difference_is_found(actual: list[int], first: int) -> None:
    result = compare_tokens(actual, [1, 2, 3])

    assert not result
    assert result.first_difference == first
    assert result.numbers()["n_same"] == first


@given(st.lists(st.integers(0, 5), min_size=1), st.lists(st.integers(0, 5), min_size=1))
def test_tokens_before_the_first_difference_are_the_same(a: list[int], e: list[int]) -> None:
    result = compare_tokens(a, e)

    assert bool(result) == (a == e)
    at = result.first_difference
    if at is not None:
        assert a[:at] == e[:at]
        assert a[at : at + 1] != e[at : at + 1]
