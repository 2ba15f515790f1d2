"""Log-mel power frames that can be concatenated and added like audio, and are augmented.

``log10`` of the mel power is stored *before* Whisper's clamp (eight below the maximum) and scaling. Every
stored piece begins and ends with silence longer than half an STFT window. Therefore the frames of
concatenated audio equal the concatenated frames exactly. Audio is added in the power domain, which is
approximate because phases are random.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from whisper.audio import HOP_LENGTH, N_FFT, mel_filters

N_MELS = 80
FLOOR = -10.0  # log10 of the smallest power in Whisper's spectrogram

Frames = NDArray[np.float32]


@cache
def _tables() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.hann_window(N_FFT), mel_filters("cpu", N_MELS)


def log_power(samples: NDArray[np.float32]) -> Frames:
    """Return the log10 mel power [frames, 80] of 16 kHz samples.

    There is one frame per 10 ms. The last frame is dropped, as in Whisper.
    """
    window, filters = _tables()
    spectrum = torch.stft(
        torch.from_numpy(samples), N_FFT, HOP_LENGTH, window=window, return_complex=True
    )
    power = filters @ spectrum[:, :-1].abs().square()
    return power.clamp_min(1e-10).log10().T.contiguous().numpy()


def whisper_input(frames: Frames, louder_elsewhere: float = 0.0) -> Frames:
    """Apply Whisper's clamp and scale to log10 power frames.

    The clamp is relative to the loudest frame of the complete audio, which is ``louder_elsewhere`` (log10
    of power) above the loudest frame of this window.
    """
    return (np.maximum(frames, frames.max() + np.float32(louder_elsewhere) - 8.0) + 4.0) / 4.0


# Augmentation of frames [n, 80]: tempo, vocal tract, microphone, room and noise.

LN10 = np.float32(np.log(10))
NOISE_KINDS = ("white", "pink", "brown", "hum", "fan", "taps", "hiss", "tones")
NOISE_SECONDS = 40


def change_tempo(frames: Frames, factor: float) -> Frames:
    """Resample in time. A ``factor`` above 1 is faster. The pitch does not change."""
    count = max(2, round(len(frames) / factor))
    position = np.linspace(0, len(frames) - 1, count, dtype=np.float32)
    below = np.minimum(position.astype(np.int64), len(frames) - 2)
    part = (position - below)[:, None]
    return frames[below] * (1 - part) + frames[below + 1] * part


def warp_matrix(factor: float) -> Frames:
    """Return a matrix [80, 80] that moves mel bin ``b * factor`` to ``b`` by linear interpolation.

    This simulates a longer or shorter vocal tract.
    """
    source = np.clip(np.arange(N_MELS) * factor, 0, N_MELS - 1.001)
    below = source.astype(np.int64)
    matrix = np.zeros((N_MELS, N_MELS), np.float32)
    columns = np.arange(N_MELS)
    matrix[below, columns] = 1 - (source - below)
    matrix[below + 1, columns] += source - below
    return matrix


def microphone(rng: np.random.Generator, strength: float) -> Frames:
    """Return a smooth random frequency response [80] in log10 power; strength 1 gives about +-5 dB."""
    knots = rng.normal(0, 0.35 * strength, 6)
    tilt = rng.normal(0, 0.4 * strength) * np.linspace(-1, 1, N_MELS)
    return (np.interp(np.linspace(0, 5, N_MELS), np.arange(6), knots) + tilt).astype(np.float32)


def add_room(power: Frames, rng: np.random.Generator) -> Frames:
    """Add late reverberation to mel *power*.

    It decays by 60 dB in 0.1 to 0.5 s and is 5 to 20 dB weaker than the speech.
    """
    decay = 10 ** (-6 * 0.01 / rng.uniform(0.1, 0.5))
    gain = 10 ** rng.uniform(-2.0, -0.8)
    out = power.copy()
    for delay in range(2, 26):
        out[delay:] += np.float32(gain * decay**delay) * power[:-delay]
    return out


def _noise(kind: str, rng: np.random.Generator) -> NDArray[np.float32]:
    n = NOISE_SECONDS * 16000
    time = np.arange(n) / 16000
    if kind == "hum":
        wave = sum(
            np.sin(2 * np.pi * rng.choice((50, 60)) * k * time + rng.uniform(0, 6)) / k
            for k in range(1, 12)
        )
        return np.asarray(wave + 0.05 * rng.normal(size=n), np.float32)
    if kind == "tones":
        pieces = []
        while sum(map(len, pieces)) < n:
            t = np.arange(int(rng.uniform(0.1, 1.2) * 16000)) / 16000
            pitch = 110 * 2 ** (rng.integers(0, 36) / 12)
            pieces.append(
                sum(np.sin(2 * np.pi * pitch * k * t) / k**1.5 for k in range(1, 6))
                * np.exp(-2 * t)
            )
        return np.concatenate(pieces)[:n].astype(np.float32)
    if kind == "taps":
        wave = 0.01 * rng.normal(size=n)
        for start in rng.integers(0, n - 1600, 120):
            wave[start : start + 1600] += rng.normal(size=1600) * np.exp(
                -np.arange(1600) / rng.uniform(30, 300)
            )
        return wave.astype(np.float32)
    spectrum = np.fft.rfft(rng.normal(size=n))
    hertz = np.maximum(np.fft.rfftfreq(n, 1 / 16000), 20)
    shape = {
        "white": np.ones_like(hertz),
        "pink": hertz**-0.5,
        "brown": hertz**-1.0,
        "fan": hertz**-0.7 * (1 + 4 * np.exp(-(((hertz - 240) / 60) ** 2))),
        "hiss": hertz**0.5,
    }[kind]
    slow = (
        1 + 0.4 * np.sin(2 * np.pi * rng.uniform(0.05, 0.5) * time)
        if kind in ("fan", "pink")
        else 1
    )
    return (np.fft.irfft(spectrum * shape, n) * slow).astype(np.float32)


def noise_wave(kind: str, seconds: float, seed: int) -> NDArray[np.float32]:
    """Return up to 40 s of one kind of noise at 16 kHz, with a root mean square of 1."""
    wave = _noise(kind, np.random.default_rng(seed))[: round(seconds * 16000)]
    return wave / np.sqrt(np.mean(wave**2))


def noise_bank(seed: int) -> list[Frames]:
    """Return the log10 mel power of 40 s of each kind of noise, at a root mean square of 1."""
    return [
        log_power(noise_wave(kind, NOISE_SECONDS, seed + i)) for i, kind in enumerate(NOISE_KINDS)
    ]


def speech_level(frames: Frames) -> float:
    """Return log10 of the mean mel power of the louder half of the frames.

    Signal-to-noise ratios are relative to this level.
    """
    power = 10 ** frames.mean(1)
    return float(np.log10(np.sort(power)[len(power) // 2 :].mean()))


def mask(frames: Frames, rng: np.random.Generator, strength: float) -> None:
    """Apply SpecAugment to the model's input in place.

    It masks up to two frequency bands, and up to one short time span plus one per three seconds.
    """
    for _ in range(rng.integers(0, 3)):
        width = int(rng.integers(0, 2 + 9 * strength))
        low = int(rng.integers(0, N_MELS - width))
        frames[:, low : low + width] = frames.mean()
    for _ in range(int(rng.integers(0, 2 + len(frames) // 300))):
        width = int(rng.integers(0, 2 + 10 * strength))
        start = int(rng.integers(0, max(1, len(frames) - width)))
        frames[start : start + width] = frames.mean()


def silence(count: int) -> Frames:
    """Return ``count`` frames of digital silence."""
    return np.full((count, N_MELS), FLOOR, np.float32)
