"""Audio files that tests write."""

import wave
from pathlib import Path

import numpy as np


def write_wav(path: Path, samples: np.ndarray, rate: int = 16_000) -> Path:
    """Write samples between -1 and 1 as 16 bits, mono."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32768).round().clip(-32768, 32767).astype("<i2").tobytes())
    return path
