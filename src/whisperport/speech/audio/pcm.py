"""Convert samples to the format used in this package: mono, 16 kHz, float32, within [-1, 1]."""

import wave
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import AudioError

if TYPE_CHECKING:
    from av import AudioFrame

SAMPLE_RATE = 16_000  # samples per second, in every Whisper model
MIN_SAMPLES = 160  # one mel frame, 10 ms; shorter audio is rejected as a mistake
_RATES = range(
    1_000, 768_001
)  # Hz; a rate outside is a damaged header, or would make the resampled audio huge
MAX_FLOAT_PEAK = (
    2.0  # above this, float samples are taken for unscaled integers; below it, they are clipped
)
_BLOCK = 10 * SAMPLE_RATE  # samples that are converted in one call
_FULL_SCALE = {"int16": 2.0**15, "int32": 2.0**31}


def to_int16(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    """Round samples (n,) within [-1, 1] to 16 bits; what is beyond is clipped."""
    return np.clip(np.round(samples * 32768), -32768, 32767).astype(np.int16)


def write_wav(file: str | IO[bytes], samples: NDArray[np.int16]) -> None:
    """Write samples (n,), mono, 16 kHz, as a WAV file."""
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(SAMPLE_RATE)
        writer.writeframes(samples.astype("<i2").tobytes())


def from_array(samples: NDArray[Any], sample_rate: int | None) -> NDArray[np.float32]:
    """Convert samples already in memory.

    Args:
        samples: (n_samples,) mono; floats within [-1, 1], or int16 or int32 at full scale.
        sample_rate: sample rate of `samples` in Hz, 1,000 to 768,000; None: 16,000.

    Returns:
        (n_samples at 16 kHz,) float32 within [-1, 1]. Floats up to 2 in magnitude are clipped, as if they
        were written to a 16-bit file.

    Raises:
        AudioError: `samples` is not one-dimensional, has another type, is empty or shorter than 10 ms,
            contains a NaN, an infinity or a value beyond 2 in magnitude; or the rate is out of range.
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
            why="expected floats within [-1, 1], int16 or int32",
            hint="convert them with `astype`",
        )
    if scale is not None:
        samples = samples / np.float64(scale)
    check_finite(samples)
    peak = float(np.abs(samples).max(initial=0.0))
    if peak > MAX_FLOAT_PEAK:
        raise AudioError(
            f"the samples have values up to {peak:g}; expected within [-1, 1]",
            why="they look like integers stored as floats",
            hint="divide them by the full scale of the integers, e.g. 32768 for 16 bit",
        )
    mono: NDArray[np.float32] = np.clip(samples, -1.0, 1.0).astype(np.float32)
    if sample_rate is not None and sample_rate != SAMPLE_RATE:
        mono = _resampled(mono, check_rate(sample_rate, "the array"))
    check_length(mono.size, "the array")
    return mono


def check_finite(samples: NDArray[Any]) -> None:
    """Raise AudioError if a sample is not a finite number."""
    if not np.isfinite(samples).all():
        raise AudioError(
            "the samples contain a NaN or an infinity",
            why="audio samples must be finite numbers",
            hint="find these samples with `numpy.isfinite(samples)`",
        )


def check_rate(sample_rate: int, name: str) -> int:
    """Return `sample_rate`, or raise AudioError if it is not 1,000 to 768,000 Hz."""
    if sample_rate not in _RATES:
        raise AudioError(
            f"{name} states a sample rate of {sample_rate} Hz",
            why=f"expected {_RATES.start} to {_RATES.stop - 1} Hz",
            hint="resample it, e.g. `ffmpeg -i IN -ar 16000 OUT.wav`",
            code="unsupported",
        )
    return sample_rate


def check_length(n_samples: int, name: str) -> None:
    """Raise AudioError if there are no samples, or fewer than one mel frame (160)."""
    if n_samples == 0:
        raise AudioError(
            f"{name} contains no samples",
            why="there is no data after its header",
            hint="record or copy it again",
            code="empty",
        )
    if n_samples < MIN_SAMPLES:
        plural = "" if n_samples == 1 else "s"
        raise AudioError(
            f"{name} is too short: {n_samples} sample{plural} at 16 kHz",
            why=f"at least one mel frame is needed ({MIN_SAMPLES} samples, 10 ms)",
            hint="give longer audio",
            code="too-short",
        )


def _resampled(samples: NDArray[np.float32], sample_rate: int) -> NDArray[np.float32]:
    """Resample to 16 kHz with FFmpeg's resampler, in float32 and without rounding to 16 bit."""
    from av import AudioResampler

    resampler = AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
    parts = [
        out.to_ndarray()[0]
        for frame in _frames(samples, sample_rate)
        for out in resampler.resample(frame)
    ]
    if not parts:
        return np.empty(0, np.float32)
    # The resampling filter may overshoot by a few percent.
    mono: NDArray[np.float32] = np.concatenate(parts)
    return np.clip(mono, -1.0, 1.0)


def _frames(samples: NDArray[np.float32], rate: int) -> Iterator["AudioFrame | None"]:
    """Yield the samples as FFmpeg frames, then None."""
    from av import AudioFrame

    for start in range(0, samples.size, _BLOCK):
        block = np.ascontiguousarray(samples[None, start : start + _BLOCK])
        frame = AudioFrame.from_ndarray(block, format="flt", layout="mono")
        frame.sample_rate = rate
        yield frame
    yield None  # makes the resampler return its remaining samples
