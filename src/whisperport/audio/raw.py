"""Samples without a header, as microphones and pipes give them."""

from collections.abc import Iterable, Iterator

import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from numpy.typing import NDArray

from whisperport.audio.pcm import SAMPLE_RATE, check_rate


def from_raw(chunks: Iterable[bytes], sample_rate: int) -> Iterator[NDArray[np.float32]]:
    """Signed 16-bit little-endian mono, in chunks of any size, as samples at 16 kHz.

    A chunk may end within a sample; half a sample at the very end is dropped.

    Returns:
        Pieces (n,) float32 within [-1, 1], each as soon as its chunk came.

    Raises:
        AudioError: an impossible rate.
    """
    samples = _samples(chunks)
    return samples if sample_rate == SAMPLE_RATE else _resampled(samples, sample_rate)


def _samples(chunks: Iterable[bytes]) -> Iterator[NDArray[np.float32]]:
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
    check_rate(sample_rate, "the raw sound")
    resampler = AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
    for piece in pieces:
        frame = AudioFrame.from_ndarray(piece[None], format="flt", layout="mono")
        frame.sample_rate = sample_rate
        yield from _out(resampler, frame)
    yield from _out(resampler, None)


def _out(resampler: AudioResampler, frame: AudioFrame | None) -> Iterator[NDArray[np.float32]]:
    for out in resampler.resample(frame):
        samples: NDArray[np.float32] = out.to_ndarray()[0]
        yield np.clip(samples, -1.0, 1.0)  # the filter may overshoot at a step
