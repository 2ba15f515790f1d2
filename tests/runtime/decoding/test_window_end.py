"""What the end of a short window may have cut off is left to the next one, and the windows go on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.runtime.decoding.segments import MIN_ADVANCE, drop_unreliable_end, split_segments

BEGIN = 50364
WINDOW = 1000  # frames: 10 s


def at(seconds: float) -> int:
    return BEGIN + round(seconds * 50)


def cut(*tokens: int):
    return split_segments(tokens, BEGIN, WINDOW)


def test_a_segment_that_ends_in_the_last_seconds_is_decoded_again() -> None:
    left = drop_unreliable_end(cut(at(0), 5, at(2.0), at(2.5), 6, at(9.9)), BEGIN, WINDOW)

    assert [segment.tokens for segment in left.segments] == [(at(0), 5, at(2.0))]
    assert left.advance == 200
    assert not left.closed


def test_repetitions_at_the_window_s_end_are_all_dropped() -> None:
    loop = [at(9.9), 6, at(9.92), at(9.92), 6, at(9.94), at(9.94), 6, at(9.96)]

    left = drop_unreliable_end(cut(at(0), 5, at(2.0), *loop), BEGIN, WINDOW)

    assert [segment.end_s for segment in left.segments] == [2.0]


@pytest.mark.parametrize("tokens", [(at(0.8), 5, at(9.9)), (at(0.8),)], ids=["at", "without"])
def test_a_single_segment_with_or_without_an_end_is_decoded_again_from_its_start(tokens) -> None:
    left = drop_unreliable_end(cut(*tokens), BEGIN, WINDOW)

    assert left.segments == ()
    assert left.advance == 80


@pytest.mark.parametrize(
    "tokens",
    [
        (at(0), 5, at(9.9)),
        (at(0), 5),
        (at(0.04), 5, at(9.9)),
        (5, 6, 7),
        (at(0), 5, at(2.0), at(2.5), 6, at(6.0)),
    ],
    ids=["all", "no end", "nearly all", "text without times", "ends well before the window"],
)
def test_a_segment_that_fills_the_window_or_ends_well_before_it_is_kept(tokens) -> None:
    whole = cut(*tokens)

    assert drop_unreliable_end(whole, BEGIN, WINDOW) == whole
    assert whole.advance == WINDOW


def test_what_was_open_anyway_stays_so() -> None:
    opened = cut(at(0), 5, at(2.0), at(2.0), 6)  # the original goes back to 2 s

    assert drop_unreliable_end(opened, BEGIN, WINDOW) == opened
    assert opened.advance == 200


@given(
    st.lists(st.integers(0, BEGIN + 1500), min_size=1, max_size=20),
    st.sampled_from([100, 500, 1000, 3000]),
)
def test_windows_always_go_on_and_nothing_is_invented(tokens: list[int], n_frames: int) -> None:
    whole = split_segments(tokens, BEGIN, n_frames)

    left = drop_unreliable_end(whole, BEGIN, n_frames)

    assert left == whole or left.advance >= MIN_ADVANCE
    assert left.segments == whole.segments[: len(left.segments)]
