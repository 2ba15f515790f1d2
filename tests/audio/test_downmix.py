"""Files of many channels as mono."""

import io
import wave

import av
import numpy as np
import pytest
from av.audio.resampler import AudioResampler
from numpy.typing import NDArray

from whisperport.speech.audio import SAMPLE_RATE, load_audio

N = 1600
RANDOM = np.random.default_rng(0)


def wav(samples: NDArray[np.int16], rate: int = SAMPLE_RATE) -> io.BytesIO:
    """(n, channels) as a file that gives the number of its channels, and not what they are."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(samples.shape[1])
        writer.setsampwidth(samples.itemsize)
        writer.setframerate(rate)
        writer.writeframes(samples.tobytes())
    return io.BytesIO(file.getvalue())


def noise(channels: int) -> NDArray[np.int16]:
    return (RANDOM.standard_normal((N, channels)) * 3000).clip(-32768, 32767).astype("<i2")


@pytest.mark.parametrize("channels", [9, 17, 64, 255])
def test_channels_that_ffmpeg_does_not_know_are_averaged(channels: int) -> None:
    samples = noise(channels)

    mono = load_audio(wav(samples))

    # Rounded to 16 bit once.
    np.testing.assert_allclose(mono, samples.mean(axis=1) / 32768, atol=0.51 / 32768)


def test_averages_of_8_bits_are_centred() -> None:
    samples = RANDOM.integers(0, 256, (N, 11), dtype=np.uint8)

    mono = load_audio(wav(samples))  # type: ignore[arg-type]

    np.testing.assert_allclose(mono, samples.mean(axis=1) / 128 - 1, atol=0.51 / 32768)


def test_averages_are_resampled() -> None:
    t = np.arange(3 * N) / 48_000
    tone = np.sin(2 * np.pi * 440 * t)
    samples = (8000 * tone[:, None] * np.linspace(0.5, 1.5, 64)).astype("<i2")

    mono = load_audio(wav(samples, rate=48_000))

    expected = 8000 / 32768 * tone[::3]
    assert mono.size == pytest.approx(N, abs=2)
    np.testing.assert_allclose(mono[200 : N - 200], expected[200 : N - 200], atol=2e-3)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 6, 7, 8, 10, 16, 24])
def test_channels_that_ffmpeg_knows_or_guesses_are_mixed_by_it(channels: int) -> None:
    samples = noise(channels)
    frame = av.AudioFrame.from_ndarray(
        samples.reshape(1, -1), format="s16", layout=f"{channels} channels"
    )
    frame.sample_rate = SAMPLE_RATE
    resampler = AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
    mixed = [out.to_ndarray()[0] for out in resampler.resample(frame) if out is not None]

    mono = load_audio(wav(samples))

    np.testing.assert_allclose(mono, np.concatenate(mixed) / 32768, atol=1.01 / 32768)
