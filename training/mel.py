"""Log-mel power frames that can be put together like sound.

``log10`` of the mel power is kept *before* Whisper's clamp to eight below the maximum and its
scaling. Because every stored piece begins and ends with silence longer than half an STFT window,
the frames of a concatenation are the concatenated frames, exactly; sounds add in the power domain,
approximately (their phases are random).
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from whisper.audio import HOP_LENGTH, N_FFT, mel_filters

N_MELS = 80
FLOOR = -10.0  # log10 of the smallest power Whisper looks at

Frames = NDArray[np.float32]


@cache
def _tables() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.hann_window(N_FFT), mel_filters("cpu", N_MELS)


def log_power(samples: NDArray[np.float32]) -> Frames:
    """log10 mel power of 16 kHz samples: [frames, 80], one frame each 10 ms, the last one dropped
    as Whisper does."""
    window, filters = _tables()
    spectrum = torch.stft(
        torch.from_numpy(samples), N_FFT, HOP_LENGTH, window=window, return_complex=True
    )
    power = filters @ spectrum[:, :-1].abs().square()
    return power.clamp_min(1e-10).log10().T.contiguous().numpy()


def whisper_input(frames: Frames, louder_elsewhere: float = 0.0) -> Frames:
    """What the model sees of log10 power frames: Whisper's clamp and scale. The clamp is relative
    to the loudest frame of the whole recording, which may be louder than this window's by
    ``louder_elsewhere`` (log10 of power)."""
    return (np.maximum(frames, frames.max() + np.float32(louder_elsewhere) - 8.0) + 4.0) / 4.0
