"""Windows that users ask for, and the value of a mask."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.errors import UsageError
from whisperport.program.masks import (
    BOUNDED_MASK,
    MASKED,
    WEAKEST_MASK,
    check_mask,
    default_mask,
    hiding_mask,
)
from whisperport.program.placement import Placement
from whisperport.program.window import (
    MARGIN,
    PADDINGS,
    UNVERIFIED,
    ShortWindows,
    Window,
    WindowOptions,
)

from ..micro import whisper_dims

# Windows that users ask for, checked against the checkpoint's sizes.

DIMS = whisper_dims(8, 1, heads=2)


def test_nothing_asked_for_is_the_checkpoints_own_window() -> None:
    assert WindowOptions().of(DIMS) is None
    assert WindowOptions(seconds=30, context_s=30, audio_s=30).of(DIMS) is None


def test_a_short_window_is_padded_to_what_the_decoder_was_trained_on() -> None:
    window = WindowOptions(seconds=10, padding="features").of(DIMS)

    assert window == Window(
        positions=500, audio_positions=500, context_positions=1500, padding="features"
    )
    assert window.padded == 1000


def test_less_padding_and_less_audio_can_be_asked_for() -> None:
    window = WindowOptions(seconds=10, padding="silence", context_s=14, audio_s=9).of(DIMS)

    assert window == Window(
        positions=500, audio_positions=450, context_positions=700, padding="silence"
    )


def test_padding_to_the_window_itself_is_none() -> None:
    assert WindowOptions(seconds=5, padding="features", context_s=5).of(DIMS) == Window(
        positions=250, audio_positions=250, context_positions=250, padding="none"
    )


def test_a_complete_window_may_hold_less_audio() -> None:
    assert WindowOptions(audio_s=28).of(DIMS) == Window(
        positions=1500, audio_positions=1400, context_positions=1500, padding="none"
    )


@given(st.integers(50, 1500), st.sampled_from(PADDINGS))
def test_every_multiple_of_20_ms_is_a_window(positions: int, padding: str) -> None:
    window = WindowOptions(seconds=positions / 50, padding=padding).of(DIMS)

    assert (window.positions if window else 1500) == positions


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (WindowOptions(seconds=10.01), "10.01 s"),
        (WindowOptions(seconds=31), "expected 1 to 30 s"),
        (WindowOptions(seconds=0.98), "expected 1 to 30 s"),
        (WindowOptions(seconds=0), "expected 1 to 30 s"),
        (WindowOptions(seconds=-5), "expected 1 to 30 s"),
        (WindowOptions(seconds=math.nan), "expected 1 to 30 s"),
        (WindowOptions(seconds=math.inf), "expected 1 to 30 s"),
        (WindowOptions(seconds=10, audio_s=11), "audio of a window cannot be 11 s"),
        (WindowOptions(seconds=10, audio_s=9.999), "audio of a window cannot be 9.999 s"),
        (
            WindowOptions(seconds=10, padding="features", context_s=9),
            "audio context of 9 s is shorter",
        ),
        (WindowOptions(seconds=10, padding="features", context_s=40), "expected 1 to 30 s"),
        (WindowOptions(seconds=10, padding="mirror"), "no padding `mirror`"),
    ],
)
def test_a_window_that_cannot_be_is_rejected(asked: WindowOptions, words: str) -> None:
    with pytest.raises(UsageError, match=words) as rejected:
        asked.of(DIMS)

    assert rejected.value.hint


@pytest.mark.parametrize(
    "sizes",
    [
        {"positions": 0, "audio_positions": 0, "context_positions": 5, "padding": "features"},
        {"positions": 5, "audio_positions": 6, "context_positions": 9, "padding": "features"},
        {"positions": 5, "audio_positions": 5, "context_positions": 4, "padding": "features"},
        {"positions": 5, "audio_positions": 5, "context_positions": 5, "padding": "features"},
        {"positions": 5, "audio_positions": 5, "context_positions": 6, "padding": "none"},
        {"positions": 5, "audio_positions": 5, "context_positions": 6, "padding": "mirror"},
    ],
)
def test_sizes_that_contradict_each_other_make_no_window(sizes: dict) -> None:
    with pytest.raises(ValueError, match=r"expected|padding"):
        Window(**sizes)


# The value of a mask: it hides tokens as -inf does, and is no larger than that needs.


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


# Windows that are as short as the rest of the audio allows.


@given(
    st.lists(st.integers(1, 1500), min_size=1, max_size=8, unique=True).map(sorted),
    st.integers(1, 3000),
)
def test_the_shortest_window_that_holds_the_audio_and_the_margin_is_chosen(
    positions: list[int], n_frames: int
) -> None:
    shortest = ShortWindows(positions=tuple(positions), min_logprob=-1.0).shortest(n_frames)

    holding = [count for count in positions if 2 * count - n_frames >= MARGIN]
    assert shortest == (min(holding) if holding else None)


def test_a_window_of_4_5_s_holds_4_s_of_audio() -> None:
    assert [UNVERIFIED.shortest(n) for n in (1, 200, 201, 400, 401, 950, 1950, 1951)] == [
        *(125, 125, 175, 225, 375, 500, 1000),
        None,
    ]


@pytest.mark.parametrize(
    ("positions", "min_logprob"),
    [
        *(((), -1.0), ((500, 250), -1.0), ((250, 250), -1.0)),
        *(((250,), number) for number in (0.1, -math.inf, math.nan)),
    ],
)
def test_lengths_in_another_order_and_impossible_thresholds_are_refused(
    positions: tuple[int, ...], min_logprob: float
) -> None:
    with pytest.raises(ValueError, match="expected"):
        ShortWindows(positions=positions, min_logprob=min_logprob)
