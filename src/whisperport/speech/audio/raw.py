"""Convert headerless samples from microphones and pipes."""

from collections.abc import Iterable, Iterator

import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from numpy.typing import NDArray

from whisperport.speech.audio.pcm import SAMPLE_RATE, check_rate


def from_raw(chunks: Iterable[bytes], sample_rate: int) -> Iterator[NDArray[np.float32]]:
    """Convert signed 16-bit little-endian mono samples to float32 at 16 kHz.

    Args:
        chunks: bytes, of any length. A chunk may end within a sample; half a sample at the end is dropped.
        sample_rate: of the chunks, in Hz.

    Returns:
        Pieces (n,) float32 within [-1, 1], each as soon as its chunk has arrived.

    Raises:
        AudioError: the rate is not 1,000 to 768,000 Hz.
    """
    samples = _samples(chunks)
    return samples if sample_rate == SAMPLE_RATE else _resampled(samples, sample_rate)


def _samples(chunks: Iterable[bytes]) -> Iterator[NDArray[np.float32]]:
    """Yield float32 samples at the rate of the chunks."""
    half = b""
    for chunk in chunks:
        data = half + chunk
        whole = len(data) // 2 * 2
        half = data[whole:]
        if whole:
            yield np.frombuffer(data[:whole], "<i2").astype(np.float32) / np.float32(32768.0)


def _resampled(
    pieces: Iterator[NDArray[np.float32]], sample_rate: int
) -> Iterator[NDArray[np.float32]]:
    """Resample pieces to 16 kHz."""
    check_rate(sample_rate, "the raw audio")
    resampler = AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
    for piece in pieces:
        frame = AudioFrame.from_ndarray(piece[None], format="flt", layout="mono")
        frame.sample_rate = sample_rate
        yield from _out(resampler, frame)
    yield from _out(resampler, None)


def _out(resampler: AudioResampler, frame: AudioFrame | None) -> Iterator[NDArray[np.float32]]:
    """Resample one frame, or for None return the remaining samples."""
    for out in resampler.resample(frame):
        samples: NDArray[np.float32] = out.to_ndarray()[0]
        yield np.clip(samples, -1.0, 1.0)  # the resampling filter may overshoot
