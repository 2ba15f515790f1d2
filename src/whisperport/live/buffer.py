"""The end of a growing sound: what is still to be heard, at most one window."""

import numpy as np
from numpy.typing import NDArray

from whisperport.audio import FRAMES_PER_SECOND, HOP_LENGTH, SAMPLE_RATE
from whisperport.audio.mel import N_FFT, mel_log_power, to_whisper_scale

Floats = NDArray[np.float32]


class Buffer:
    """Samples from a mel frame on.

    Args:
        n_mels, n_frames: of one window of the model.
        audio_frames: how many of these may hold sound.
    """

    def __init__(self, n_mels: int, n_frames: int, audio_frames: int) -> None:
        self._n_mels, self._n_frames = n_mels, n_frames
        self._capacity = audio_frames * HOP_LENGTH
        self._samples = np.empty(0, np.float32)
        self._peak = -np.inf  # log10 power of the loudest bin so far, as of a pipe's
        self.start = 0  # mel frame at which it begins

    @property
    def room(self) -> int:
        """Samples that can be added."""
        return self._capacity - self._samples.size

    @property
    def frames(self) -> int:
        """Whole mel frames."""
        return self._samples.size // HOP_LENGTH

    @property
    def start_s(self) -> float:
        return self.start / FRAMES_PER_SECOND

    @property
    def end_s(self) -> float:
        return self.start_s + self._samples.size / SAMPLE_RATE

    def add(self, samples: Floats) -> None:
        """Take samples (n,), n <= room."""
        self._samples = np.concatenate([self._samples, samples])

    def cut(self, before_s: float) -> None:
        """Forget the sound before `before_s`; a time before the buffer, or after it, is its bound."""
        frames = min(round(before_s * FRAMES_PER_SECOND) - self.start, self.frames)
        if frames > 0:
            self.start += frames
            self._samples = self._samples[frames * HOP_LENGTH :].copy()

    def mel(self) -> Floats:
        """On Whisper's scale: (n_mels, n_frames); at least 201 samples have to be there.

        Reflected before the beginning, zero after the sound, as the original has it.
        """
        before = np.pad(self._samples, (N_FFT // 2, 0), mode="reflect")
        wanted = (self._n_frames - 1) * HOP_LENGTH + N_FFT
        samples = np.pad(before, (0, max(wanted - before.size, 0)))[:wanted]
        power = mel_log_power(samples, self._n_mels)
        self._peak = max(self._peak, float(power.max()))
        mel = to_whisper_scale(power, self._peak)
        mel[:, self.frames :] = 0
        return mel
