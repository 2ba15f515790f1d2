"""The log-mel spectrogram as a user writes it, with the mistakes that a user makes.

Written from Whisper's description, not from the package's code, so that a mistake in one is found by the
other.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
RATE = 16_000
FFT = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrogram:
    """How a spectrogram is computed; the defaults are Whisper's."""

    bins: int | None = None  # None: the model's number
    hop: int = 160
    centred: bool = True  # frames are centred, with 200 reflected samples at both ends
    natural_log: bool = False
    floor: bool = True  # values are at least the maximum less 8
    normalized: bool = True  # (x + 4) / 4
    sample_scale: float = 1.0  # 32768: integers were not divided
    transposed: bool = False  # written as (frames, bins)

    def of(self, samples: Floats, bins: int, frames: int) -> Floats:
        """Return the input (bins, frames) that the device reads.

        Args:
            samples: (n,) within [-1, 1], the window without padding.
            bins: number of mel bins of the model's input.
            frames: number of frames of the model's input.
        """
        window = np.zeros(frames * 160, np.float32)
        n = min(len(window), len(samples))
        window[:n] = samples[:n] * np.float32(self.sample_scale)
        log_power = np.log if self.natural_log else np.log10
        power = self._mel_power(window, self.bins or bins)
        x = log_power(np.maximum(power, 1e-10))
        if self.floor:
            x = np.maximum(x, x.max() - 8.0)
        if self.normalized:
            x = (x + 4.0) / 4.0
        return self._in_buffer(x.astype(np.float32), bins, frames)

    def _mel_power(self, window: Floats, bins: int) -> NDArray[np.float64]:
        padded = np.pad(window, FFT // 2, mode="reflect") if self.centred else window
        count = (len(padded) - FFT) // self.hop + 1
        starts = self.hop * np.arange(count)
        hann = np.sin(np.pi * np.arange(FFT) / FFT) ** 2
        spectrum = np.fft.rfft(padded[starts[:, None] + np.arange(FFT)] * hann, axis=1)
        return triangles(bins) @ (np.abs(spectrum) ** 2).T

    def _in_buffer(self, x: Floats, bins: int, frames: int) -> Floats:
        """Cut or pad with zeros to the model's input, as a script does that copies what fits."""
        buffer = np.zeros((bins, frames), np.float32)
        b, f = min(bins, x.shape[0]), min(frames, x.shape[1])
        buffer[:b, :f] = x[:b, :f]
        return buffer.T.reshape(bins, frames).copy() if self.transposed else buffer


@lru_cache(maxsize=8)
def triangles(bins: int) -> NDArray[np.float64]:
    """Triangular filters of unit area, equally spaced on Slaney's mel scale, (bins, 201)."""
    step = np.log(6.4) / 27  # above 1 kHz: 27 steps for a factor of 6.4; below: 66.7 Hz per step
    top = 15 + np.log(8000 / 1000) / step
    mels = np.linspace(0, top, bins + 2)
    corners = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp(step * (mels - 15)))
    hertz = np.arange(FFT // 2 + 1) * RATE / FFT
    left, peak, right = (corners[i : i + bins, None] for i in range(3))
    up, down = (hertz - left) / (peak - left), (right - hertz) / (right - peak)
    return np.maximum(0, np.minimum(up, down)) * 2 / (right - left)
