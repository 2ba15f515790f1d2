"""Windows that users ask for, checked against the checkpoint's sizes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.errors import UsageError
from whisperport.program.window import PADDINGS, Window, WindowOptions

from ..published_dims import whisper_dims

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
