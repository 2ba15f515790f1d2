"""The value of a mask: it hides tokens as -inf does, and is no larger than that needs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.program.masks import (
    BOUNDED_MASK,
    MASKED,
    WEAKEST_MASK,
    check_mask,
    default_mask,
    hiding_mask,
)
from whisperport.program.placement import Placement


def softmax(scores: np.ndarray) -> np.ndarray:
    weights: np.ndarray = np.exp(scores - scores.max())
    return weights / weights.sum()


@given(
    spread=st.floats(0, 2000),
    rows=st.integers(1, 896),
    visible=st.lists(st.floats(-50, 50), min_size=1, max_size=9),
)
def test_hidden_tokens_change_no_weight_of_a_visible_token_in_float32(
    spread: float, rows: int, visible: list[float]
) -> None:
    # given: all hidden scores are as large as the spread allows
    seen = np.array(visible, np.float32)
    hidden = np.full(rows, seen.max() + np.float32(spread), np.float32)

    weights = softmax(np.concatenate([seen, hidden + np.float32(hiding_mask(spread, rows))]))

    # then: half of the last bit of the sum, and the rounding of exp at scores of this size
    alone = softmax(seen)
    np.testing.assert_allclose(weights[: len(seen)], alone, rtol=4e-7)
    assert weights[len(seen) :].sum() < 2**-24


@given(spread=st.floats(0, 1000), more=st.floats(0, 1000), rows=st.integers(1, 896))
def test_a_larger_spread_never_needs_a_weaker_mask(spread: float, more: float, rows: int) -> None:
    assert hiding_mask(spread + more, rows) <= hiding_mask(spread, rows) <= WEAKEST_MASK


@pytest.mark.parametrize("spread", [math.nan, math.inf, -math.inf, 1e30])
def test_scores_that_no_mask_hides_get_the_largest_one(spread: float) -> None:
    assert hiding_mask(spread, 448) == MASKED


def test_the_bounded_mask_hides_a_full_cache_whose_scores_are_40_above_the_visible_ones() -> None:
    assert hiding_mask(40, 448) == BOUNDED_MASK
    assert hiding_mask(41, 448) < BOUNDED_MASK


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("mask", [MASKED, BOUNDED_MASK])
def test_both_dtypes_hold_both_masks_exactly(dtype: type, mask: float) -> None:
    assert float(dtype(mask)) == mask


def test_a_precision_that_is_not_float32_has_a_bounded_mask() -> None:
    assert default_mask("fp32") == MASKED
    assert {default_mask(p) for p in ("fp16", "w8a8", "w8a16", "anything")} == {BOUNDED_MASK}


@pytest.mark.parametrize(
    "mask", [0.0, 64.0, -1.0, -15.9, -30001.0, math.nan, math.inf, -math.inf, -1e308]
)
def test_a_mask_that_hides_nothing_or_overflows_float16_is_rejected(mask: float) -> None:
    with pytest.raises(ValueError, match="expected -30000 to -16"):
        check_mask(mask)
    with pytest.raises(ValueError, match="expected -30000 to -16"):
        Placement("a", mask=mask)
