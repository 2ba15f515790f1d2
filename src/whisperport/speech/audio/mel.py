"""Compute the log-mel spectrogram that Whisper was trained on, with numpy.

    samples ─ reflect 200 on both sides ─ frames of 400 every 160 ─ Hann ─ |rfft|² ─ slaney filters
            ─ log10 ─ floor 8 below the maximum ─ (x + 4) / 4

`numpy.fft.rfft` transforms 256 frames in each call. Measured for a 30 s window on one thread: 3.0 ms this
way, 6 ms with all frames in one call (the spectra do not fit into the CPU cache), 8.5 ms with a DFT matrix.

The filters are applied in groups of 8. A filter is 0 outside its triangle, so a group needs a part of the
201 frequencies only. Its matmul is also too small for numpy's OpenBLAS to use several threads. Those wait
actively after each matmul, and take the cores from the program that runs next. Measured with two threads: a
window took 55 ms of CPU time with one matmul for all filters, and takes 4.5 ms.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from whisperport.errors import AudioError
from whisperport.speech.audio.pcm import SAMPLE_RATE

N_FFT = 400  # samples in one frame: 25 ms
HOP_LENGTH = 160  # samples from one frame to the next: 10 ms
FRAMES_PER_SECOND = SAMPLE_RATE // HOP_LENGTH  # 100
DYNAMIC_RANGE = 8.0  # powers of ten below the maximum that are kept: 80 dB
LOWEST = 1e-10  # mel power below it counts as this
# log10 of that, for a frame of silence. The same ufunc as for all frames, so that both are equal.
SILENCE = np.log10(np.full(1, LOWEST, np.float32))[0]
_FRAMES_AT_ONCE = 256  # see the module's docstring
_FILTERS_AT_ONCE = 8  # see the module's docstring


def log_mel(
    samples: NDArray[Any], n_mels: int, *, n_frames: int | None = None
) -> NDArray[np.float32]:
    """Compute the log-mel spectrogram of one array of samples.

    The floor is 8 below the maximum of the given array after padding. So cutting the spectrogram afterwards
    is not the same as cutting the samples before. openai-whisper's `transcribe()` passes all audio and 30 s
    of zeros, then cuts windows from the spectrogram. transformers' `WhisperFeatureExtractor` passes one
    window, padded to 30 s; to do the same, pass one window and `n_frames`.

    Args:
        samples: (n_samples,) mono, 16 kHz, within [-1, 1]; any float dtype.
        n_mels: 80, or 128 for large-v3 and turbo.
        n_frames: number of frames of 10 ms to which the samples are first padded with zeros, or cut.
            None: as many as the samples fill.

    Returns:
        (n_mels, n_frames or n_samples // 160) float32.

    Raises:
        AudioError: `samples` is not a one-dimensional float array, contains a NaN or an infinity, or is
            shorter than 201 samples while `n_frames` is None (200 samples are reflected at each end).

    Source: openai/whisper@c0d2f62, whisper/audio.py:110-157.
    """
    checked = _checked(samples, n_frames)
    padded = np.pad(checked, N_FFT // 2, mode="reflect")
    # The last frame, half of it reflected, is dropped as in openai-whisper.
    power = mel_log_power(padded[: checked.size // HOP_LENGTH * HOP_LENGTH + N_FFT - 1], n_mels)
    return to_whisper_scale(power, float(power.max()))


def mel_log_power(
    samples: NDArray[np.float32], n_mels: int, hop: int = HOP_LENGTH
) -> NDArray[np.float32]:
    """Return log10 of the mel power of every complete frame, (n_mels, n) float32, at least -10.

    Args:
        samples: (n_samples,) float32. Frames of 400 samples begin every `hop` samples; there is no padding.
        n_mels: number of mel bands.
        hop: samples from one frame to the next. Whisper was trained with 160 only.
    """
    frames = sliding_window_view(samples, N_FFT)[::hop]  # (n, 400), a view
    groups, window = _filter_groups(n_mels), _hann_window()
    mel = np.empty((n_mels, len(frames)), np.float32)
    for start in range(0, len(frames), _FRAMES_AT_ONCE):
        stop = min(start + _FRAMES_AT_ONCE, len(frames))
        spectrum = np.fft.rfft(frames[start:stop] * window)
        power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32, copy=False)
        for bands, bins, filters in groups:
            np.matmul(filters, power[:, bins].T, out=mel[bands, start:stop])
    return np.log10(np.maximum(mel, LOWEST, out=mel), out=mel)


def to_whisper_scale(power: NDArray[np.float32], peak: float) -> NDArray[np.float32]:
    """Raise values to at least 8 below `peak`, then compute (x + 4) / 4. Changes `power` and returns it."""
    np.maximum(power, np.float32(peak - DYNAMIC_RANGE), out=power)
    power += 4.0
    power /= 4.0
    return power


@lru_cache(maxsize=4)
def mel_filters(n_mels: int) -> NDArray[np.float32]:
    """Compute triangular filters of unit area on the slaney mel scale, (n_mels, 201) float32, read-only.

    A test checks that they equal openai-whisper's `mel_filters.npz` within 1e-6.
    Source: librosa.filters.mel(sr=16000, n_fft=400, n_mels=n_mels), which made that file.

    Raises:
        ValueError: `n_mels` is not 1 to 201, the number of frequencies.
    """
    if not 1 <= n_mels <= N_FFT // 2 + 1:
        raise ValueError(f"`n_mels` is {n_mels}; expected 1 to {N_FFT // 2 + 1}")
    filters = triangles(slaney_edges(n_mels), is_normalized=True)
    filters.setflags(write=False)
    return filters


def slaney_edges(n_mels: int) -> NDArray[np.float64]:
    """Return the edges in Hz (n_mels + 2,) of filters on the slaney mel scale."""
    top = float(_hz_to_mel(np.asarray(SAMPLE_RATE / 2)))
    return _mel_to_hz(np.linspace(0.0, top, n_mels + 2))


def triangles(edges_hz: NDArray[np.float64], *, is_normalized: bool) -> NDArray[np.float32]:
    """Compute triangular filters (n, 201) from one edge (n + 2,) in Hz to the next but one.

    Args:
        edges_hz: rising.
        is_normalized: whether each has the area 1, else its peak is 1.
    """
    bins_hz = np.arange(N_FFT // 2 + 1) * (SAMPLE_RATE / N_FFT)
    widths = np.diff(edges_hz)
    ramps = edges_hz[:, None] - bins_hz[None, :]
    rising = -ramps[:-2] / widths[:-1, None]
    falling = ramps[2:] / widths[1:, None]
    area = (edges_hz[2:] - edges_hz[:-2])[:, None] / 2 if is_normalized else 1
    filters: NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling)) / area
    return filters.astype(np.float32)


@lru_cache(maxsize=4)
def _filter_groups(n_mels: int) -> tuple[tuple[slice, slice, NDArray[np.float32]], ...]:
    """Return the filters in groups: mel bands, the frequencies at which they are not 0, and the filters."""
    groups = []
    for start in range(0, n_mels, _FILTERS_AT_ONCE):
        bands = slice(start, min(start + _FILTERS_AT_ONCE, n_mels))
        filters = mel_filters(n_mels)[bands]
        used = np.flatnonzero(filters.any(axis=0))
        bins = slice(used[0], used[-1] + 1) if used.size else slice(0, 1)
        groups.append((bands, bins, np.ascontiguousarray(filters[:, bins])))
    return tuple(groups)


# The slaney scale: linear to 1 kHz (3 mel per 200 Hz), then 27 mel for each factor of 6.4.
_LINEAR_HZ_PER_MEL = 200.0 / 3
_LOG_START_HZ = 1000.0
_LOG_START_MEL = _LOG_START_HZ / _LINEAR_HZ_PER_MEL
_LOG_STEP = np.log(6.4) / 27.0


def _hz_to_mel(hz: NDArray[np.float64]) -> NDArray[np.float64]:
    above = np.maximum(hz, _LOG_START_HZ)
    log_part = _LOG_START_MEL + np.log(above / _LOG_START_HZ) / _LOG_STEP
    return np.where(hz < _LOG_START_HZ, hz / _LINEAR_HZ_PER_MEL, log_part)


def _mel_to_hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    above = np.maximum(mel, _LOG_START_MEL)
    log_part = _LOG_START_HZ * np.exp(_LOG_STEP * (above - _LOG_START_MEL))
    return np.where(mel < _LOG_START_MEL, mel * _LINEAR_HZ_PER_MEL, log_part)


@lru_cache(maxsize=1)
def _hann_window() -> NDArray[np.float32]:
    """Return the periodic Hann window, (400,) float32."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(N_FFT) / N_FFT)).astype(np.float32)


def _checked(samples: NDArray[Any], n_frames: int | None) -> NDArray[np.float32]:
    samples = np.asarray(samples)
    if samples.ndim != 1 or samples.dtype.kind != "f":
        raise AudioError(
            f"cannot compute a spectrogram of {samples.dtype} samples of shape {samples.shape}",
            why="expected (n_samples,) floats: mono, 16 kHz, within [-1, 1]",
            hint="convert them with `load_audio(samples, sample_rate=...)`",
        )
    samples = samples.astype(np.float32, copy=False)
    if not np.isfinite(samples).all():
        raise AudioError(
            "the samples contain a NaN or an infinity",
            why="a spectrogram needs finite samples",
            hint="find these samples with `numpy.isfinite(samples)`",
        )
    if n_frames is not None:
        if n_frames < 2:
            raise ValueError(f"`n_frames` is {n_frames}; expected at least 2")
        n_samples = n_frames * HOP_LENGTH
        samples = samples[:n_samples]
        return np.pad(samples, (0, n_samples - samples.size))
    if samples.size <= N_FFT // 2:
        raise AudioError(
            f"{samples.size} samples are too few for a spectrogram",
            why=f"{N_FFT // 2} samples are reflected at each end, so at least "
            f"{N_FFT // 2 + 1} are needed",
            hint="set `n_frames`, which pads the samples with zeros",
        )
    return samples
