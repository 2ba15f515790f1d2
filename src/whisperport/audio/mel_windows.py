"""Compute windows of an audio file's spectrogram, equal to those of a spectrogram of the complete file.

openai-whisper computes one spectrogram of the audio file and 30 s of silence, and cuts windows from it. The
floor is 8 below the maximum of the complete file, and frames at the edge of a window include samples beyond
the edge. This module computes the same frames in two passes, so that memory does not grow with the
duration: the maximum in the first pass, the windows in the second. Audio that can be read only once, such
as a pipe, has no first pass: its maximum is that of the audio so far.
"""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whisperport.audio.mel import HOP_LENGTH, N_FFT, mel_log_power, to_whisper_scale
from whisperport.audio.pcm import SAMPLE_RATE
from whisperport.audio.stream import AudioSource, AudioStream

PIECE = 3000  # mel frames in each step of the first pass
HALF = N_FFT // 2

Floats = NDArray[np.float32]


class MelWindows:
    """Computes windows of an audio file's log-mel spectrogram, from the first to the last.

    Args:
        source: a path, "-" for standard input, a binary file object, or an array; see `AudioStream`.
        n_mels: number of mel bands: 80, or 128 for large-v3 and turbo.
        n_frames: mel frames in one window: 3000 for 30 s.
        sample_rate: sample rate of an array in Hz; None: 16 kHz.

    Raises:
        AudioError: the source is missing, cannot be read, is shorter than 10 ms, or has samples that are
            not finite numbers.
    """

    def __init__(
        self, source: AudioSource, n_mels: int, n_frames: int, *, sample_rate: int | None = None
    ) -> None:
        self._n_mels, self._n_frames = n_mels, n_frames
        self._peak: float = -np.inf
        self._peak_is_final = False  # whether the peak is that of the complete file
        self._first: Floats | None = None  # power of the first `PIECE` frames, until they were used
        if can_be_read_twice(source):
            with AudioStream(source, sample_rate=sample_rate, look_back_s=1.0) as first:
                self._peak, self._first = _peak(first, n_mels)
            self._peak_is_final = True
        self._stream = AudioStream(source, sample_rate=sample_rate, look_back_s=1.0)

    @property
    def duration_s(self) -> float | None:
        """Duration in seconds; None if the source does not state it and its end was not reached."""
        if self._stream.ended:
            return self._stream.n_decoded / SAMPLE_RATE
        return self._stream.duration_s

    def window(self, start: int, n_frames: int | None = None) -> tuple[Floats, int]:
        """Compute the frames `start` to `start + n_frames`. After the end of the audio they are silence.

        Args:
            start: first mel frame; not below that of an earlier call.
            n_frames: number of frames; None: those of a window.

        Returns:
            (n_mels, n_frames) float32 on Whisper's scale, and the number of frames with audio.
        """
        n_frames = self._n_frames if n_frames is None else n_frames
        samples = _samples(self._stream, start, n_frames)
        first, self._first = self._first, None
        if start == 0 and first is not None and first.shape[1] == n_frames:
            power = first
        else:
            power = mel_log_power(samples, self._n_mels)
        if not self._peak_is_final:
            self._peak = max(self._peak, float(power.max()))
        content = (
            self._stream.n_decoded // HOP_LENGTH - start
        )  # beyond the end, all audio is decoded
        return to_whisper_scale(power, self._peak), min(max(content, 0), n_frames)

    def close(self) -> None:
        """Close the source, unless the caller opened it."""
        self._stream.close()


def _samples(stream: AudioStream, start: int, n_frames: int) -> Floats:
    """Return the samples of frames, reflected before the beginning of the audio, and 0 after its end."""
    first = start * HOP_LENGTH - HALF
    wanted = n_frames * HOP_LENGTH + N_FFT - HOP_LENGTH  # samples up to the end of the last frame
    samples = stream.read(max(first, 0), wanted + min(first, 0))
    samples = np.pad(samples, (0, wanted + min(first, 0) - samples.size))
    return np.concatenate([samples[-first:0:-1], samples]) if first < 0 else samples


def _peak(stream: AudioStream, n_mels: int) -> tuple[float, Floats | None]:
    """Return the maximum log10 mel power of a stream, and the power of its first `PIECE` frames."""
    peak, start, first = -np.inf, 0, None
    while not stream.ended or start * HOP_LENGTH < stream.n_decoded:
        power = mel_log_power(_samples(stream, start, PIECE), n_mels)
        peak = max(peak, float(power.max()))
        first = power if first is None else first
        start += PIECE
    return peak, first


def can_be_read_twice(source: AudioSource) -> bool:
    """Return whether a source can be read twice. True for an array or a path of a regular file."""
    if isinstance(source, np.ndarray):
        return True
    return isinstance(source, str | os.PathLike) and str(source) != "-" and Path(source).is_file()
