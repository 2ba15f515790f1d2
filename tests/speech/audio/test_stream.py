"""Audio and spectrograms in pieces: the same numbers as in one piece, in bounded memory."""

import io
import tracemalloc
import wave
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from whisperport.errors import AudioError
from whisperport.speech.audio import (
    SAMPLE_RATE,
    AudioStream,
    MelWindows,
    decode,
    load_audio,
    log_mel,
    mel_windows,
)
from whisperport.speech.audio import stream as stream_module
from whisperport.speech.audio.pcm import MIN_SAMPLES
from whisperport.speech.audio.pcm_stream import PCM_OF_BYTES, PcmStream
from whisperport.speech.audio.stream import PIECE

from .conftest import WriteAudio, tone

# Audio is read in order, in bounded memory.

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
    monkeypatch.setattr(decode, "AudioDecoder", Hour)
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
    monkeypatch.setattr(decode, "AudioDecoder", Hour)

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


# Samples that arrive in pieces of any length become those of an audio file with the same bytes.


def pcm_tone(rate: int, width: int, channels: int, seconds: float = 0.7) -> bytes:
    """Bytes of noise and a tone, as in a wav file."""
    random = np.random.default_rng(width)
    n = round(rate * seconds)
    samples = 0.5 * np.sin(np.arange(n) / 9)[:, None] + 0.1 * random.standard_normal((n, channels))
    if width == 1:
        return (samples * 127 + 128).astype(np.uint8).tobytes()
    full = (samples * 2.0**31).clip(-(2**31), 2**31 - 1).astype("<i4")
    return full.view(np.uint8).reshape(-1, 4)[:, 4 - width :].tobytes()


def wav_file(data: bytes, rate: int, width: int, channels: int) -> io.BytesIO:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(width)
        writer.setframerate(rate)
        writer.writeframes(data)
    file.seek(0)
    return file


def streamed(stream: PcmStream, data: bytes, size: int) -> np.ndarray:
    pieces = [stream.push(data[at : at + size]) for at in range(0, len(data), size)]
    return np.concatenate([*pieces, stream.end()]) / np.float32(32768)


@pytest.mark.parametrize(
    ("rate", "width", "channels"),
    [(48_000, 2, 2), (8_000, 1, 1), (16_000, 2, 1), (24_000, 2, 1), (44_100, 3, 2), (22_050, 4, 6)],
)
@pytest.mark.parametrize("size", [997, 10**6])
def test_a_stream_equals_the_wav_file_exactly(
    rate: int, width: int, channels: int, size: int
) -> None:
    data = pcm_tone(rate, width, channels)
    expected = load_audio(wav_file(data, rate, width, channels))

    found = streamed(PcmStream(PCM_OF_BYTES[width], rate, channels), data, size)

    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("codec", ["pcm_mulaw", "pcm_alaw"])
def test_telephone_samples_are_expanded_and_resampled(codec: str) -> None:
    loud, quiet = (b"\x80", b"\xff") if codec == "pcm_mulaw" else (b"\xaa", b"\xd5")

    found = [streamed(PcmStream(codec, 8_000), one * 800, 33) for one in (loud, quiet)]

    assert [one.size for one in found] == [1600, 1600]
    assert found[0][800] == pytest.approx(0.98, abs=0.02)
    assert abs(found[1][800]) < 0.001


def test_half_a_sample_at_the_end_is_dropped() -> None:
    stream = PcmStream("pcm_s16le", 16_000)

    assert stream.push(b"\x00\x40\x01").tolist() == [0x4000]
    assert stream.push(b"").tolist() == []
    assert stream.end().tolist() == []


@pytest.mark.parametrize(
    ("rate", "channels"), [(0, 1), (999, 1), (10**9, 1), (8_000, 0), (8_000, 9)]
)
def test_impossible_forms_are_rejected(rate: int, channels: int) -> None:
    with pytest.raises(AudioError):
        PcmStream("pcm_s16le", rate, channels)


# Windows of a spectrogram are parts of the spectrogram of the complete file, whether it is kept or not.

WINDOW = 3000
RATE = 16_000


@pytest.mark.parametrize("kept", [0, mel_windows.LARGEST_KEPT])
@pytest.mark.parametrize(
    "n_samples", [160, 201, 30 * RATE - 1, 30 * RATE, 30 * RATE + 200, 62 * RATE + 37]
)
def test_every_frame_is_that_of_the_complete_file_and_silence(n_samples: int, kept: int) -> None:
    noise = np.random.default_rng(n_samples).uniform(-0.5, 0.5, n_samples).astype(np.float32)
    complete = log_mel(np.pad(noise, (0, 2 * WINDOW * 160)), 80)
    windows, n_audio = MelWindows(noise, 80, WINDOW, largest_kept=kept), n_samples // 160
    # At the end of the audio, the frames around it contain some of its samples.
    for start in sorted({0, 137, WINDOW - 1, WINDOW, n_audio - 1, n_audio, n_audio + 2}):
        if start <= n_audio + 2:
            found, with_audio = windows.window(start)
            # Rounding of float32: a product of matrices depends on the place of a frame in it.
            np.testing.assert_allclose(found, complete[:, start : start + WINDOW], atol=1e-6)
            assert with_audio == min(max(n_audio - start, 0), WINDOW)
    assert windows.duration_s == n_samples / RATE


def test_a_short_file_is_read_once_and_a_long_one_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[AudioStream] = []

    class Counted(AudioStream):
        def __init__(self, *given: Any, **named: Any) -> None:
            opened.append(self)
            super().__init__(*given, **named)

    monkeypatch.setattr(mel_windows, "AudioStream", Counted)
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 40 * RATE).astype(np.float32)
    MelWindows(noise, 80, WINDOW).window(0)
    assert len(opened) == 1
    MelWindows(noise, 80, WINDOW, largest_kept=4 * 80 * 3999).window(0)
    assert len(opened) == 3


def test_frames_have_the_same_bits_whether_they_are_kept_or_not() -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 100 * RATE).astype(np.float32)
    kept, computed = (MelWindows(noise, 80, WINDOW, largest_kept=n) for n in (2**30, 0))

    for start, n_frames in ((0, WINDOW), (137, 500), (2900, WINDOW), (8000, WINDOW), (9999, 200)):
        found, n_audio = computed.window(start, n_frames)
        expected, n_expected = kept.window(start, n_frames)
        assert n_audio == n_expected
        assert found.tobytes() == expected.tobytes()
