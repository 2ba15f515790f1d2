"""A chunk of several parts of the audio: its spectrogram, and times in the audio."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.speech.audio import MelWindows, Span
from whisperport.speech.text import Segment, Word
from whisperport.transcription import Transcript
from whisperport.transcription.chunk import Chunk, ChunkMel

# In the chunk: 1 to 5 s, 5 to 7 s and 7 to 10 s.
CHUNK = Chunk((Span(100, 500), Span(2500, 2700), Span(6000, 6300)), pad=30)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ((1.3, 4.7), (1.3, 4.7)),
        ((5.3, 6.7), (25.3, 26.7)),
        ((7.3, 9.7), (60.3, 62.7)),
        ((2.0, 8.0), (2.0, 61.0)),  # of several parts
        ((1.3, 5.0), (1.3, 5.0)),  # at the border: with the part before
        ((5.0, 6.7), (25.0, 26.7)),  # at the border: with the part after
        ((1.3, 5.2), (1.3, 5.2)),  # in the silence after the border: with the part before
        ((4.8, 6.7), (24.8, 26.7)),  # in the silence before the border: with the part after
        ((9.0, 10.5), (62.0, 63.5)),  # after the end
    ],
)
def test_a_text_has_the_times_of_the_part_that_holds_it(
    text: tuple[float, float], expected: tuple[float, float]
) -> None:
    assert CHUNK.times(*text) == pytest.approx(expected)


def test_a_text_within_the_silence_between_two_parts_does_not_end_before_it_begins() -> None:
    assert CHUNK.times(4.9, 4.95) == pytest.approx((4.9, 4.95))
    assert CHUNK.times(4.9, 5.1) == pytest.approx((4.9, 25.1))


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 400)), min_size=1, max_size=6),
    st.integers(0, 100),
    st.lists(st.integers(0, 2500), min_size=2, max_size=12),
)
def test_times_in_the_audio_keep_their_order(
    steps: list[tuple[int, int]], pad: int, frames: list[int]
) -> None:
    parts, at = [], 0
    for silence, length in steps:
        parts.append(Span(at + silence, at + silence + length))
        at += silence + length
    chunk = Chunk(tuple(parts), pad)
    times = sorted(chunk.start / 100 + frame / 100 for frame in frames)

    texts = [chunk.times(*pair) for pair in zip(times[::2], times[1::2], strict=False)]

    in_order = [time for text in texts for time in text]
    assert all(before <= after + 1e-9 for before, after in pairwise(in_order))


def test_segments_words_and_truncated_windows_are_at_their_times_in_the_audio() -> None:
    words = (Word(" one", 1.5, 2.0, 0.5), Word(" two", 5.5, 6.0, 0.5))
    segment = Segment(1.5, 6.0, " one two", seek=100, words=words)
    later = Segment(7.5, 8.0, " three", seek=700)

    found = CHUNK.in_audio(Transcript("one two three", (segment, later), "en", 90.0, (7.0,)))

    assert [(s.start, s.end, s.seek) for s in found.segments] == [
        (1.5, 26.0, 100),
        (60.5, 61.0, 6000),
    ]
    assert [(w.start, w.end) for w in found.segments[0].words or ()] == [(1.5, 2.0), (25.5, 26.0)]
    assert found.truncated == (60.0,)
    assert found.duration_s == 90.0


def test_the_spectrogram_of_a_chunk_is_that_of_its_parts_and_silence() -> None:
    audio = np.random.default_rng(0).standard_normal(16_000 * 9).astype(np.float32) * 0.1
    all_frames, _ = MelWindows(audio, 80, 1000).window(0)
    chunk = Chunk((Span(50, 180), Span(400, 470), Span(880, 930)))  # ends 0.3 s after the audio

    found = ChunkMel(MelWindows(audio, 80, 1000), chunk, 1000)

    assert found.frames.shape == (80, 1000)
    parts = [all_frames[:, 50:180], all_frames[:, 400:470], all_frames[:, 880:900]]
    np.testing.assert_allclose(found.frames[:, :220], np.concatenate(parts, axis=1), atol=1e-6)
    assert not found.frames[:, 220:].any()
    later, n_frames = found.window(50 + 200)
    assert n_frames == 20
    assert np.array_equal(later[:, :20], found.frames[:, 200:220])
    assert not later[:, 20:].any()
