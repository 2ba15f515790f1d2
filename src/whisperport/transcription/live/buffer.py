"""The most recent audio of a stream, at most one window, which is decoded in each pass."""

import numpy as np
from numpy.typing import NDArray

from whisperport.speech.audio import FRAMES_PER_SECOND, HOP_LENGTH, SAMPLE_RATE
from whisperport.speech.audio.mel import N_FFT, mel_log_power, to_whisper_scale

Floats = NDArray[np.float32]


class Buffer:
    """The most recent samples of a stream, and their spectrogram.

    Args:
        n_mels: number of mel bands of the model.
        n_frames: mel frames of 10 ms in a window of the model.
        audio_frames: how many of these frames may have audio.

    Attributes:
        start: mel frame of the stream at which the buffer begins.
    """

    def __init__(self, n_mels: int, n_frames: int, audio_frames: int) -> None:
        self._n_mels, self._n_frames = n_mels, n_frames
        self._capacity = audio_frames * HOP_LENGTH
        self._samples = np.empty(0, np.float32)
        self._peak = -np.inf  # log10 power of the loudest bin so far
        self.start = 0

    @property
    def room(self) -> int:
        """Number of samples that can be added."""
        return self._capacity - self._samples.size

    @property
    def frames(self) -> int:
        """Number of complete mel frames in the buffer."""
        return self._samples.size // HOP_LENGTH

    @property
    def start_s(self) -> float:
        """Start of the buffer in the stream, in seconds."""
        return self.start / FRAMES_PER_SECOND

    @property
    def end_s(self) -> float:
        """End of the buffer in the stream, in seconds."""
        return self.start_s + self._samples.size / SAMPLE_RATE

    def add(self, samples: Floats) -> None:
        """Append samples (n,) float32, n <= `room`."""
        self._samples = np.concatenate([self._samples, samples])

    def cut(self, before_s: float) -> None:
        """Remove the audio before `before_s` seconds of the stream, at most all of the buffer."""
        frames = min(round(before_s * FRAMES_PER_SECOND) - self.start, self.frames)
        if frames > 0:
            self.start += frames
            self._samples = self._samples[frames * HOP_LENGTH :].copy()

    def mel(self) -> Floats:
        """Compute the spectrogram on Whisper's scale, (n_mels, n_frames). Needs at least 201 samples.

        As in openai-whisper, samples are reflected before the beginning, and the spectrogram is 0 after the
        audio.
        """
        before = np.pad(self._samples, (N_FFT // 2, 0), mode="reflect")
        n_samples = (self._n_frames - 1) * HOP_LENGTH + N_FFT
        samples = np.pad(before, (0, max(n_samples - before.size, 0)))[:n_samples]
        power = mel_log_power(samples, self._n_mels)
        self._peak = max(self._peak, float(power.max()))
        mel = to_whisper_scale(power, self._peak)
        mel[:, self.frames :] = 0
        return mel
