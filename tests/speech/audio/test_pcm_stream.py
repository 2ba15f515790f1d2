"""Samples that arrive in pieces of any length become those of an audio file with the same bytes."""

import io
import wave

import numpy as np
import pytest

from whisperport.errors import AudioError
from whisperport.speech.audio import PcmStream, load_audio
from whisperport.speech.audio.pcm_stream import PCM_OF_BYTES


def tone(rate: int, width: int, channels: int, seconds: float = 0.7) -> bytes:
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
    data = tone(rate, width, channels)
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
