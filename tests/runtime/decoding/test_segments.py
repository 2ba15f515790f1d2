"""Cutting a window at its times, whatever a model says."""

from hypothesis import given
from hypothesis import strategies as st

from whisperport.runtime.decoding.segments import split_segments

BEGIN = 100


def test_text_that_no_time_opens_begins_with_the_window() -> None:
    # as a model says it that was asked for no times
    cut = split_segments([7, 8, BEGIN + 50, BEGIN + 50, 9, BEGIN + 75], BEGIN, 3000)

    assert [(segment.start_s, segment.end_s) for segment in cut.segments] == [
        (0.0, 1.0),
        (1.0, 1.5),
    ]


@given(st.lists(st.integers(0, BEGIN + 1500), min_size=1, max_size=12))
def test_for_any_tokens_none_is_lost_and_no_time_is_negative(tokens: list[int]) -> None:
    cut = split_segments(tokens, BEGIN, 3000)

    kept = [token for segment in cut.segments for token in segment.tokens]
    assert kept == tokens[: len(kept)]
    assert 0 <= cut.advance <= 3000
    assert all(min(segment.start_s, segment.end_s) >= 0 for segment in cut.segments)
