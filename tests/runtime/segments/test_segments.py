"""Segments of a window: its end, short windows, and times of words."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.program.generation import Generation
from whisperport.runtime import DecodeOptions, decode_window
from whisperport.runtime.decoding.rules import Rules
from whisperport.runtime.engine.scores import Scores
from whisperport.runtime.segments.alignment import align_words
from whisperport.runtime.segments.segments import MIN_ADVANCE, drop_unreliable_end, split_segments
from whisperport.speech.text import Tokenizer

from ...micro import DIMS, GENERATION, tokenizer_json
from ..runners import FEATURES, Scripted

# Cutting a window at its times, whatever a model says.

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


# What the end of a short window may have cut off is left to the next one, and the windows go on.

MULTILINGUAL_BEGIN = 50364
WINDOW = 1000  # frames: 10 s


def at(seconds: float) -> int:
    return MULTILINGUAL_BEGIN + round(seconds * 50)


def cut(*tokens: int):
    return split_segments(tokens, MULTILINGUAL_BEGIN, WINDOW)


def test_a_segment_that_ends_in_the_last_seconds_is_decoded_again() -> None:
    left = drop_unreliable_end(
        cut(at(0), 5, at(2.0), at(2.5), 6, at(9.9)), MULTILINGUAL_BEGIN, WINDOW
    )

    assert [segment.tokens for segment in left.segments] == [(at(0), 5, at(2.0))]
    assert left.advance == 200
    assert not left.closed


def test_repetitions_at_the_window_s_end_are_all_dropped() -> None:
    loop = [at(9.9), 6, at(9.92), at(9.92), 6, at(9.94), at(9.94), 6, at(9.96)]

    left = drop_unreliable_end(cut(at(0), 5, at(2.0), *loop), MULTILINGUAL_BEGIN, WINDOW)

    assert [segment.end_s for segment in left.segments] == [2.0]


@pytest.mark.parametrize("tokens", [(at(0.8), 5, at(9.9)), (at(0.8),)], ids=["at", "without"])
def test_a_single_segment_with_or_without_an_end_is_decoded_again_from_its_start(tokens) -> None:
    left = drop_unreliable_end(cut(*tokens), MULTILINGUAL_BEGIN, WINDOW)

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

    assert drop_unreliable_end(whole, MULTILINGUAL_BEGIN, WINDOW) == whole
    assert whole.advance == WINDOW


def test_what_was_open_anyway_stays_so() -> None:
    opened = cut(at(0), 5, at(2.0), at(2.0), 6)  # the original goes back to 2 s

    assert drop_unreliable_end(opened, MULTILINGUAL_BEGIN, WINDOW) == opened
    assert opened.advance == 200


@given(
    st.lists(st.integers(0, MULTILINGUAL_BEGIN + 1500), min_size=1, max_size=20),
    st.sampled_from([100, 500, 1000, 3000]),
)
def test_windows_always_go_on_and_nothing_is_invented(tokens: list[int], n_frames: int) -> None:
    whole = split_segments(tokens, MULTILINGUAL_BEGIN, n_frames)

    left = drop_unreliable_end(whole, MULTILINGUAL_BEGIN, n_frames)

    assert left == whole or left.advance >= MIN_ADVANCE
    assert left.segments == whole.segments[: len(left.segments)]


# Decoding in a window shorter than 30 s: times stay 20 ms apart and inside of the window.

MICRO_BEGIN = GENERATION.timestamp_begin
WHISPER = Generation(
    start_of_transcript=50258,
    end_of_text=50257,
    start_of_previous=50361,
    no_speech=50362,
    no_timestamps=50363,
)


def allowed(rules: Rules, said: list[int], favourite: int) -> np.ndarray:
    logits = np.zeros(51865, np.float32)
    logits[favourite] = 20.0
    rules.apply(Scores(logits), said)
    return np.isfinite(logits)


@given(latest=st.integers(50, 1500), opened=st.integers(0, 1500), text=st.integers(0, 50256))
def test_no_timestamp_beyond_the_window_is_decoded(latest: int, opened: int, text: int) -> None:
    rules = Rules(WHISPER, timestamps=True, suppressed=(), latest_timestamp=latest)
    begin = WHISPER.timestamp_begin

    for said in ([], [begin + min(opened, latest)], [begin + min(opened, latest), text]):
        may = allowed(rules, said, 51864)
        assert not may[begin + latest + 1 :].any()
        assert may.any()


def test_in_a_full_window_every_timestamp_may_be_decoded() -> None:
    whole = Rules(WHISPER, timestamps=True, suppressed=(), latest_timestamp=1500)
    free = Rules(WHISPER, timestamps=True, suppressed=())

    for said in ([], [50364, 5]):
        assert (allowed(whole, said, 51864) == allowed(free, said, 51864)).all()


def test_a_segment_that_opens_at_the_window_s_end_can_still_end() -> None:
    rules = Rules(WHISPER, timestamps=True, suppressed=(), latest_timestamp=250)

    may = allowed(rules, [50364, 5, 50614, 50614, 7], 51864)

    assert may[WHISPER.end_of_text]
    assert not may[50364:].any()


def test_the_first_time_is_counted_in_20_ms_whatever_the_window() -> None:
    """openai-whisper counts it in 30 s / n_audio_ctx: 0.06 s in a model cut to 500 positions."""
    engine = Scripted([MICRO_BEGIN + 9, 5, GENERATION.end_of_text])
    engine.latest_timestamp = 10

    decoded = decode_window(
        engine, FEATURES, DecodeOptions(language="en", max_initial_timestamp=0.08)
    )

    assert decoded.tokens[0] <= MICRO_BEGIN + 4


@pytest.mark.parametrize("latest", [2, 5, DIMS.n_audio_ctx])
def test_timestamps_end_with_the_audio_of_a_window(latest: int) -> None:
    engine = Scripted([MICRO_BEGIN, 5, MICRO_BEGIN + 11, GENERATION.end_of_text])
    engine.latest_timestamp = latest

    decoded = decode_window(engine, FEATURES, DecodeOptions(language="en"))

    assert max(decoded.tokens) <= MICRO_BEGIN + latest


# Times of words at the edges; that they are right is held against openai-whisper elsewhere.


def test_words_beyond_the_decoders_positions_get_no_times(micro_decoder: Any, audio: Any) -> None:
    # given: as many tokens as positions, which `max_tokens` allows where no times are asked for
    decoder = micro_decoder()
    decoder.start_window(audio(0))
    tokenizer = Tokenizer.from_json(tokenizer_json(), GENERATION)
    text = [*range(10), *range(20, 34)]
    assert len(text) == DIMS.n_text_ctx

    timings = align_words(
        decoder, tokenizer, text, language="en", task="transcribe", n_frames=2 * DIMS.n_audio_ctx
    )

    # then: four start tokens and the end take their places
    timed = [token for timing in timings for token in timing.tokens]
    assert timed == text[: DIMS.n_text_ctx - 5]
