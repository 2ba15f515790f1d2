"""Audio is read in order, in bounded memory."""

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from whisperport.speech.audio import SAMPLE_RATE, AudioStream
from whisperport.speech.audio import stream as stream_module
from whisperport.speech.audio.pcm import MIN_SAMPLES
from whisperport.speech.audio.stream import PIECE

from .conftest import WriteAudio, tone

SOUND = tone(SAMPLE_RATE, 4.0)
SECOND = tone(SAMPLE_RATE, 1.0)


class Hour:
    """Stands for a decoder of a file of one hour."""

    duration_s = None

    def __init__(self, source: object) -> None: ...

    def pieces(self) -> Iterator[NDArray[np.float32]]:
        for _ in range(3600):
            yield SECOND.copy()


@given(
    steps=st.lists(st.tuples(st.integers(-4000, 20_000), st.integers(0, 12_000)), max_size=12),
    piece=st.integers(2000, 70_000),
)
@settings(max_examples=60)
def test_any_forward_reading_gives_the_samples_asked_for(
    steps: list[tuple[int, int]], piece: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "PIECE", piece)
        check_forward_reading(steps)


def check_forward_reading(steps: list[tuple[int, int]]) -> None:
    stream = AudioStream(SOUND, look_back_s=0.25)
    start, furthest = 0, 0

    for move, n_samples in steps:
        start = max(0, furthest - 4000, start + move)  # 0.25 s back: exactly what is kept
        furthest = max(furthest, start)
        found = stream.read(start, n_samples)

        np.testing.assert_array_equal(found, SOUND[start : start + n_samples])


def test_reading_before_what_is_kept_is_rejected() -> None:
    stream = AudioStream(SOUND, look_back_s=1.0)
    stream.read(3 * SAMPLE_RATE, 100)

    with pytest.raises(ValueError, match="those before 32000 were dropped"):
        stream.read(2 * SAMPLE_RATE - 1, 100)


def test_the_end_is_known_once_it_was_reached() -> None:
    stream = AudioStream(SOUND)

    first, ended_early = stream.read(0, 100), stream.ended
    last = stream.read(SOUND.size - 10, 100)
    after = stream.read(SOUND.size + 5, 100)

    assert (first.size, last.size, after.size) == (100, 10, 0)
    assert not ended_early
    assert stream.ended
    assert stream.n_decoded == SOUND.size


def test_what_was_read_is_a_copy() -> None:
    stream = AudioStream(SOUND)

    stream.read(0, 100)[:] = 9.0

    np.testing.assert_array_equal(stream.read(0, 100), SOUND[:100])


@pytest.mark.parametrize("suffix", ["wav", "flac", "mp3", "ogg", "m4a"])
def test_the_length_is_known_beforehand_from_the_container(
    write_audio: WriteAudio, suffix: str
) -> None:
    path = write_audio(tone(48000, 4.0), 48000, suffix)

    with AudioStream(path) as stream:
        assert stream.duration_s == pytest.approx(
            4.0, abs=0.1
        )  # lossy codecs count complete frames


def test_the_length_of_an_array_is_known() -> None:
    assert AudioStream(SOUND).duration_s == 4.0


def test_an_hour_passes_through_in_the_memory_of_six_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_module, "AudioDecoder", Hour)
    window = 30 * SAMPLE_RATE

    tracemalloc.start()
    stream, n_read, start = AudioStream("hour.wav"), 0, 0
    while (samples := stream.read(start, window)).size:
        n_read += samples.size
        start += window
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert n_read == 3600 * SAMPLE_RATE
    # Two kept and one new are joined into two (a third was dropped), and the reader holds one.
    assert peak < 6.5 * window * 4


def test_skipping_far_ahead_keeps_nothing_of_what_was_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_module, "AudioDecoder", Hour)

    tracemalloc.start()
    found = AudioStream("hour.wav", look_back_s=1.0).read(3500 * SAMPLE_RATE, SAMPLE_RATE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    np.testing.assert_array_equal(found, SECOND)
    assert peak < 10 * SECOND.nbytes


@pytest.mark.parametrize("n_samples", [MIN_SAMPLES, MIN_SAMPLES + 1])
def test_one_frame_of_audio_is_enough(write_audio: WriteAudio, n_samples: int) -> None:
    path = write_audio(SOUND[:n_samples], SAMPLE_RATE)

    with AudioStream(path) as stream:
        assert stream.read(0, 1000).size == n_samples


def test_little_of_a_long_array_is_copied() -> None:
    stream = AudioStream(np.zeros(20 * PIECE, np.float32), look_back_s=0)

    for position in range(0, 20 * PIECE, PIECE // 3):
        stream.read(position, PIECE // 3)
        assert stream.n_decoded - position <= PIECE + PIECE // 3
