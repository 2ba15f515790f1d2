"""Decoding in a window shorter than 30 s: times stay 20 ms apart and inside of the window."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.program.generation import Generation
from whisperport.runtime import DecodeOptions, decode_window
from whisperport.runtime.decoding.rules import Rules
from whisperport.runtime.engine.scores import Scores

from ...micro import DIMS, GENERATION
from ..scripted import FEATURES, Scripted

BEGIN = GENERATION.timestamp_begin
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
    engine = Scripted([BEGIN + 9, 5, GENERATION.end_of_text])
    engine.latest_timestamp = 10

    decoded = decode_window(
        engine, FEATURES, DecodeOptions(language="en", max_initial_timestamp=0.08)
    )

    assert decoded.tokens[0] <= BEGIN + 4


@pytest.mark.parametrize("latest", [2, 5, DIMS.n_audio_ctx])
def test_timestamps_end_with_the_audio_of_a_window(latest: int) -> None:
    engine = Scripted([BEGIN, 5, BEGIN + 11, GENERATION.end_of_text])
    engine.latest_timestamp = latest

    decoded = decode_window(engine, FEATURES, DecodeOptions(language="en"))

    assert max(decoded.tokens) <= BEGIN + latest
