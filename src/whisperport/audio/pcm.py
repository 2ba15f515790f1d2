"""Samples as this package passes them around: mono, 16 kHz, float32, within [-1, 1]."""

from collections.abc import Iterator
from typing import Any

import av
import numpy as np
from av.audio.resampler import AudioResampler
from numpy.typing import NDArray

from whisperport.errors import AudioError

SAMPLE_RATE = 16_000  # samples per second, in every Whisper model
MIN_SAMPLES = 160  # one mel frame, 10 ms; anything shorter is not sound but a mistake
_RATES = range(1_000, 768_001)  # Hz; outside it a header is damaged, or resampling explodes
MAX_FLOAT_PEAK = (
    2.0  # float samples above this were integers and never scaled; below it, merely hot
)
_BLOCK = 10 * SAMPLE_RATE  # samples converted at once
_FULL_SCALE = {"int16": 2.0**15, "int32": 2.0**31}


def from_array(samples: NDArray[Any], sample_rate: int | None) -> NDArray[np.float32]:
    """Convert samples already in memory.

    Args:
        samples: (n_samples,) mono; floats within [-1, 1], or int16 or int32 at full scale.
        sample_rate: of `samples`, in Hz; None: 16 kHz.

    Returns:
        (n_samples at 16 kHz,) float32 within [-1, 1]. Floats a little beyond are clipped, as
        writing them to a file would.

    Raises:
        AudioError: not one-dimensional, not numbers, empty, shorter than 10 ms, a NaN or an
            infinity among them, far outside [-1, 1], or an impossible rate.
    """
    samples = np.asarray(samples)
    if samples.ndim != 1:
        raise AudioError(
            f"expected mono samples of shape (n_samples,), got {samples.shape}",
            hint="average the channels first, e.g. `samples.mean(axis=0)` for (channels, n)",
        )
    scale = _FULL_SCALE.get(samples.dtype.name)
    if scale is None and samples.dtype.kind != "f":
        raise AudioError(
            f"cannot read samples of dtype {samples.dtype}",
            why="floats within [-1, 1], int16 and int32 are understood",
            hint="convert them with `astype`",
        )
    if scale is not None:
        samples = samples / np.float64(scale)
    if not np.isfinite(samples).all():
        raise AudioError(
            "the samples hold a NaN or an infinity",
            why="that is no sound",
            hint="find where they come from: `numpy.isfinite(samples)` tells which",
        )
    peak = float(np.abs(samples).max(initial=0.0))
    if peak > MAX_FLOAT_PEAK:
        raise AudioError(
            f"the samples reach {peak:g}; expected within [-1, 1]",
            why="they look like integers stored as floats",
            hint="divide by the integers' full scale, e.g. 32768 for 16 bit",
        )
    mono: NDArray[np.float32] = np.clip(samples, -1.0, 1.0).astype(np.float32)
    if sample_rate is not None and sample_rate != SAMPLE_RATE:
        mono = _resampled(mono, check_rate(sample_rate, "the array"))
    check_length(mono.size, "the array")
    return mono


def check_rate(sample_rate: int, name: str) -> int:
    """`sample_rate` itself; AudioError when nothing records at it."""
    if sample_rate not in _RATES:
        raise AudioError(
            f"{name} states a sample rate of {sample_rate} Hz",
            why=f"expected {_RATES.start} to {_RATES.stop - 1} Hz",
            hint="resample it, e.g. `ffmpeg -i IN -ar 16000 OUT.wav`",
        )
    return sample_rate


def check_length(n_samples: int, name: str) -> None:
    """AudioError for no sound at all, or less than one frame of it."""
    if n_samples == 0:
        raise AudioError(
            f"{name} holds no samples",
            why="its header is followed by nothing",
            hint="record or copy it again",
        )
    if n_samples < MIN_SAMPLES:
        plural = "" if n_samples == 1 else "s"
        raise AudioError(
            f"{name} is too short: {n_samples} sample{plural} at 16 kHz",
            why=f"at least one mel frame is needed ({MIN_SAMPLES} samples, 10 ms)",
            hint="give a longer recording",
        )


def _resampled(samples: NDArray[np.float32], sample_rate: int) -> NDArray[np.float32]:
    """By FFmpeg's resampler, in floats: no rounding to 16 bit on the way."""
    resampler = AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
    parts = [
        out.to_ndarray()[0]
        for frame in _frames(samples, sample_rate)
        for out in resampler.resample(frame)
    ]
    if not parts:
        return np.empty(0, np.float32)
    # The filter may overshoot at a step by a few percent.
    mono: NDArray[np.float32] = np.concatenate(parts)
    return np.clip(mono, -1.0, 1.0)


def _frames(samples: NDArray[np.float32], rate: int) -> Iterator[av.AudioFrame | None]:
    for start in range(0, samples.size, _BLOCK):
        block = np.ascontiguousarray(samples[None, start : start + _BLOCK])
        frame = av.AudioFrame.from_ndarray(block, format="flt", layout="mono")
        frame.sample_rate = rate
        yield frame
    yield None  # asks the resampler for what it still holds
