"""Log-mel power frames that can be concatenated and added like audio.

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
