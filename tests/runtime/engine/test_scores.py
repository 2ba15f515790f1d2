"""The logarithm of the sum of all exponentials: computed here, or by a program and then corrected."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.runtime.decoding.rules import Rules
from whisperport.runtime.engine.scores import MOST_FORBIDDEN, Scores, log_sum_exp

from ...micro import GENERATION

V = 51_865  # multilingual Whisper's vocabulary
# The given logarithm is rounded to float32, and a subtraction of 95% of the sum loses a factor of 20.
CLOSE = 5e-5


def logits(seed: int = 0, n: int = V) -> np.ndarray:
    return (4 * np.random.default_rng(seed).standard_normal(n)).astype(np.float32)


def exact(row: np.ndarray) -> float:
    return float(np.logaddexp.reduce(row.astype(np.float64)))


def summed(row: np.ndarray) -> Scores:
    """Scores as a program returns them: with the logarithm of the sum, in float32."""
    return Scores(row, float(np.float32(exact(row))))


@pytest.mark.parametrize("offset", [0, 59, -61, 200, -200])
def test_log_sum_exp_is_that_of_float64(offset: int) -> None:
    """Also if the exponentials themselves are beyond the range of float32."""
    row = logits() + np.float32(offset)
    row[:100] = -np.inf

    expected = np.logaddexp.reduce(row.astype(np.float64))

    rounding = float(np.spacing(np.float32(abs(offset))))
    assert float(log_sum_exp(row)) == pytest.approx(expected, abs=1e-5 + rounding)


@pytest.mark.parametrize(
    "tokens",
    [
        slice(0, 0),
        slice(7),
        slice(V - 1501, None),
        slice(MOST_FORBIDDEN + 1),
        np.array([], np.int64),
        np.arange(0, V, V // 89),
    ],
    ids=str,
)
def test_forbidden_tokens_are_no_part_of_the_sum(tokens: slice | np.ndarray) -> None:
    row = logits()
    scores = summed(row)

    scores.forbid(tokens)

    assert (row[tokens] == -np.inf).all()
    assert scores.log_sum().value == pytest.approx(exact(row), abs=CLOSE)


@given(
    st.integers(0, 99),
    st.lists(st.lists(st.integers(0, 40), max_size=8, unique=True), max_size=4),
    st.floats(-40, 40, width=32),
    st.booleans(),
)
def test_the_sum_is_that_of_the_tokens_that_remain(
    seed: int, forbidden: list[list[int]], raised: float, known: bool
) -> None:
    """Also if a token was forbidden twice, or was nearly all of the sum."""
    row = logits(seed, n=42)
    row[7] += np.float32(raised)
    scores = summed(row) if known else Scores(row)

    for tokens in forbidden:
        scores.forbid(np.array(tokens, np.int64))

    assert scores.log_sum().value == pytest.approx(exact(row), abs=CLOSE)


def test_a_token_that_a_checkpoint_suppresses_twice_is_subtracted_once() -> None:
    generation = replace(GENERATION, suppressed_at_start=(5, 5))
    row = logits(n=generation.timestamp_begin + 9)
    row[5] += 9
    scores = summed(row)

    Rules(generation, timestamps=False, suppressed=()).apply(scores, [])

    assert scores.log_sum().value == pytest.approx(exact(row), abs=CLOSE)


def test_a_sum_does_not_change_with_the_logits_after_it() -> None:
    """The next step overwrites them."""
    row = logits()
    scores = summed(row)
    scores.forbid(slice(50))
    scores.forbid(np.array([77]))
    expected = exact(row)

    found = scores.log_sum()
    row[:] = 0

    assert found.value == pytest.approx(expected, abs=CLOSE)


def test_a_changed_logit_changes_the_sum() -> None:
    row = logits()
    scores = summed(row)

    scores.forget_sum()
    row[9] = 30

    assert scores.log_sum().value == pytest.approx(exact(row), abs=CLOSE)


def test_a_copy_is_independent() -> None:
    row = logits()
    scores = summed(row)
    scores.forbid(slice(9))
    copy = scores.copy()

    scores.forbid(slice(30, 60))

    assert copy.log_sum().value == pytest.approx(exact(copy.logits), abs=CLOSE)
    assert (copy.logits[30:60] > -np.inf).all()


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("timestamps", [True, False])
@given(data=st.data())
def test_rules_leave_the_sum_of_what_they_leave(
    timestamps: bool, penalty: float, data: st.DataObject
) -> None:
    begin, end = GENERATION.timestamp_begin, GENERATION.end_of_text
    size = begin + 40
    rules = Rules(
        GENERATION,
        timestamps=timestamps,
        suppressed={1, 2, end + 1},
        max_initial_timestamp=30,
        latest_timestamp=35,
        repetition_penalty=penalty,
    )
    said = st.lists(st.sampled_from([3, 4, begin + 3, begin + 4]), max_size=5)
    tokens = sorted(data.draw(said, "tokens"), key=lambda token: token >= begin)
    row = logits(data.draw(st.integers(0, 99), "seed"), n=size)
    row[data.draw(st.sampled_from([3, end, begin + 8]), "likely")] += 10
    scores = summed(row)

    rules.apply(scores, tokens)

    assert scores.log_sum().value == pytest.approx(exact(row), abs=CLOSE)
