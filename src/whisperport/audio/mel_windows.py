"""The spectrogram of a whole recording, in pieces: equal to that of the recording as one array.

openai-whisper takes one spectrogram of the recording and 30 s of silence, and cuts windows from it. Its
floor, 8 below the maximum, is that of the recording, and its frames at a window's edge see the sound
beyond. Here the same frames are computed where they are wanted: the maximum in a first pass, the
frames in a second, so memory does not grow with length. Sound that can be heard only once (a pipe) has
no first pass: its maximum is that of what was heard so far.
"""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whisperport.audio.mel import HOP_LENGTH, N_FFT, mel_log_power, to_whisper_scale
from whisperport.audio.pcm import SAMPLE_RATE
from whisperport.audio.stream import AudioSource, AudioStream

PIECE = 3000  # frames at a time in the first pass
HALF = N_FFT // 2

Floats = NDArray[np.float32]


class MelWindows:
    """Windows of a recording's spectrogram, forward only.

    Args:
        source: as `AudioStream` takes it.
        n_mels: 80, or 128 for large-v3 and turbo.
        n_frames: frames in one window: 3000 for 30 s.

    Raises:
        AudioError: the sound is missing, unreadable, shorter than 10 ms, or not numbers.
    """

    def __init__(
        self, source: AudioSource, n_mels: int, n_frames: int, *, sample_rate: int | None = None
    ) -> None:
        self._n_mels, self._n_frames = n_mels, n_frames
        self._peak: float = -np.inf
        self._whole = False  # whether the peak is that of the whole recording
        if can_be_read_twice(source):
            with AudioStream(source, sample_rate=sample_rate, look_back_s=1.0) as first:
                self._peak, self._whole = _peak(first, n_mels), True
        self._stream = AudioStream(source, sample_rate=sample_rate, look_back_s=1.0)

    @property
    def duration_s(self) -> float | None:
        """Seconds, where the source states it or its end was met."""
        if self._stream.ended:
            return self._stream.n_decoded / SAMPLE_RATE
        return self._stream.duration_s

    def window(self, start: int) -> tuple[Floats, int]:
        """Frames `start` to `start + n_frames`, silence after the recording's end included.

        Returns:
            (n_mels, n_frames) float32 on Whisper's scale, and how many frames hold sound.
        """
        power = _power(self._stream, start, self._n_frames, self._n_mels)
        if not self._whole:
            self._peak = max(self._peak, float(power.max()))
        content = self._stream.n_decoded // HOP_LENGTH - start  # past the end, all was decoded
        return to_whisper_scale(power, self._peak), min(max(content, 0), self._n_frames)

    def close(self) -> None:
        self._stream.close()


def _power(stream: AudioStream, start: int, n_frames: int, n_mels: int) -> Floats:
    """log10 mel power of frames, each seeing the sound around it; reflected before the beginning."""
    first = start * HOP_LENGTH - HALF
    wanted = n_frames * HOP_LENGTH + N_FFT - HOP_LENGTH  # the last frame's end
    samples = stream.read(max(first, 0), wanted + min(first, 0))
    samples = np.pad(samples, (0, wanted + min(first, 0) - samples.size))
    if first < 0:
        samples = np.concatenate([samples[-first:0:-1], samples])
    return mel_log_power(samples, n_mels)


def _peak(stream: AudioStream, n_mels: int) -> float:
    peak, start = -np.inf, 0
    while not stream.ended or start * HOP_LENGTH < stream.n_decoded:
        peak = max(peak, float(_power(stream, start, PIECE, n_mels).max()))
        start += PIECE
    return peak


def can_be_read_twice(source: AudioSource) -> bool:
    """An array or a file; neither standard input, nor a pipe, nor a file object."""
    if isinstance(source, np.ndarray):
        return True
    return isinstance(source, str | os.PathLike) and str(source) != "-" and Path(source).is_file()
