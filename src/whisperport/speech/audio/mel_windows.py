"""Compute windows of an audio file's spectrogram, equal to those of a spectrogram of the complete file.

openai-whisper computes one spectrogram of the audio file and 30 s of silence, and cuts windows from it. The
floor is 8 below the maximum of the complete file, and frames at the edge of a window include samples beyond
the edge. This module computes the same frames in two passes, so that memory does not grow with the
duration: the maximum in the first pass, the windows in the second. The spectrogram of a short file is kept
in the first pass, so there is no second one. Audio that can be read only once, such as a pipe, has no first
pass: its maximum is that of the audio so far.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import LongAudioError
from whisperport.speech.audio.callback_file import ReopenedFile
from whisperport.speech.audio.mel import HOP_LENGTH, N_FFT, SILENCE, mel_log_power, to_whisper_scale
from whisperport.speech.audio.pcm import SAMPLE_RATE
from whisperport.speech.audio.stream import AudioSource, AudioStream

PIECE = 3000  # mel frames in each step of the first pass
LARGEST_KEPT = 32 * 2**20  # bytes; 17 minutes with 80 mel bands
HALF = N_FFT // 2

Floats = NDArray[np.float32]


class MelWindows:
    """Computes windows of an audio file's log-mel spectrogram, from the first to the last.

    Args:
        source: a path, "-" for standard input, a binary file object, or an array; see `AudioStream`.
        n_mels: number of mel bands: 80, or 128 for large-v3 and turbo.
        n_frames: mel frames in one window: 3000 for 30 s.
        sample_rate: sample rate of an array in Hz; None: 16 kHz.
        is_stopped: called before each part of the first pass, which ends if it returns True.
        longest_s: maximum duration of audio that can be read twice, in seconds; None: any.
        largest_kept: bytes of a spectrogram that is kept in memory; a larger one is computed twice.

    Raises:
        LongAudioError: the audio is longer than that.
        AudioError: the source is missing, cannot be read, is shorter than 10 ms, or has samples that are
            not finite numbers.
        KeyboardInterrupt: `is_stopped` returned True.
    """

    def __init__(
        self,
        source: AudioSource,
        n_mels: int,
        n_frames: int,
        *,
        sample_rate: int | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
        longest_s: float | None = None,
        largest_kept: int = LARGEST_KEPT,
    ) -> None:
        self._n_mels, self._n_frames = n_mels, n_frames
        self._first: _FirstPass | None = None
        if can_be_read_twice(source):
            with AudioStream(source, sample_rate=sample_rate, look_back_s=1.0) as stream:
                self._first = _first_pass(stream, n_mels, is_stopped, longest_s, largest_kept)
        self._peak = self._first.peak if self._first else -np.inf
        self._pieces: dict[int, Floats] = {}  # of the second pass, by number
        self._stream: AudioStream | None = None  # of the second pass
        if self._first is None or self._first.power is None:
            self._stream = AudioStream(source, sample_rate=sample_rate, look_back_s=1.0)

    @property
    def duration_s(self) -> float | None:
        """Duration in seconds; None if the source does not state it and its end was not reached."""
        if self._stream is None or self._first is not None or self._stream.ended:
            return self._n_decoded / SAMPLE_RATE
        return self._stream.duration_s

    @property
    def _n_decoded(self) -> int:
        """Number of samples: of all audio that can be read twice; of other audio, decoded so far."""
        if self._first is not None:
            return self._first.n_samples
        return self._stream.n_decoded if self._stream is not None else 0

    def window(self, start: int, n_frames: int | None = None) -> tuple[Floats, int]:
        """Compute the frames `start` to `start + n_frames`. After the end of the audio they are silence.

        Args:
            start: first mel frame; not below that of an earlier call.
            n_frames: number of frames; None: those of a window.

        Returns:
            (n_mels, n_frames) float32 on Whisper's scale, and the number of frames with audio.
        """
        n_frames = self._n_frames if n_frames is None else n_frames
        power = np.full((self._n_mels, n_frames), SILENCE, np.float32)
        audio = self._audio(start, n_frames)
        power[:, : audio.shape[1]] = audio
        if self._first is None:
            self._peak = max(self._peak, float(power.max()))
        # Beyond the end, all audio is decoded.
        content = self._n_decoded // HOP_LENGTH - start
        return to_whisper_scale(power, self._peak), min(max(content, 0), n_frames)

    def _audio(self, start: int, n_frames: int) -> Floats:
        """Return the log10 mel power of those of the frames that begin before the end of the audio."""
        if self._first is None:
            assert self._stream is not None
            return _power(self._stream, start, n_frames, self._n_mels)
        if self._first.power is not None:
            return self._first.power[:, start : start + n_frames]
        return self._in_pieces(start, n_frames)

    def _in_pieces(self, start: int, n_frames: int) -> Floats:
        """Return frames of the second pass, computed in the pieces of the first.

        The rounding of a matrix multiplication depends on the place of a frame in it, so that other pieces
        would give other bits.
        """
        assert self._stream is not None
        first, last = start // PIECE, (start + n_frames - 1) // PIECE
        self._pieces = {number: piece for number, piece in self._pieces.items() if number >= first}
        for number in range(first, last + 1):
            if number not in self._pieces:
                piece = _power(self._stream, number * PIECE, PIECE, self._n_mels)
                self._pieces[number] = piece
        together = np.concatenate([self._pieces[n] for n in range(first, last + 1)], axis=1)
        offset = start - first * PIECE
        return together[:, offset : offset + n_frames]

    def close(self) -> None:
        """Close the source, unless the caller opened it."""
        if self._stream is not None:
            self._stream.close()


@dataclass(frozen=True, slots=True, eq=False)
class _FirstPass:
    """What the first pass over the audio found: the maximum log10 mel power, and the number of samples."""

    peak: float
    n_samples: int
    power: Floats | None  # (n_mels, n) of all frames with audio; None: too large to be kept


def _first_pass(
    stream: AudioStream,
    n_mels: int,
    is_stopped: Callable[[], bool],
    longest_s: float | None,
    kept: int,
) -> _FirstPass:
    pieces: list[Floats] = []
    peak, start = -np.inf, 0
    while not stream.ended or start * HOP_LENGTH - HALF < stream.n_decoded:
        if is_stopped():
            raise KeyboardInterrupt
        power = _power(stream, start, PIECE, n_mels)
        if longest_s is not None and stream.n_decoded > longest_s * SAMPLE_RATE:
            raise LongAudioError(longest_s)
        peak = max(peak, float(power.max(initial=SILENCE)))
        kept -= power.nbytes
        pieces = [*pieces, power] if kept >= 0 else []
        start += PIECE
    whole = np.concatenate(pieces, axis=1) if kept >= 0 else None
    return _FirstPass(peak, stream.n_decoded, whole)


def _power(stream: AudioStream, start: int, n_frames: int, n_mels: int) -> Floats:
    """Return the log10 mel power of frames of a stream, (n_mels, n): those before the end of its audio."""
    samples = _samples(stream, start, n_frames)
    with_audio = min(n_frames, -(-samples.size // HOP_LENGTH))
    if not with_audio:
        return np.empty((n_mels, 0), np.float32)
    size = with_audio * HOP_LENGTH + N_FFT - HOP_LENGTH  # up to the end of the last frame
    return mel_log_power(np.pad(samples, (0, size - samples.size)), n_mels)


def _samples(stream: AudioStream, start: int, n_frames: int) -> Floats:
    """Return the samples of frames, reflected before the beginning of the audio; fewer at its end."""
    first = start * HOP_LENGTH - HALF
    n_samples = n_frames * HOP_LENGTH + N_FFT - HOP_LENGTH  # up to the end of the last frame
    samples = stream.read(max(first, 0), n_samples + min(first, 0))
    if first >= 0:
        return samples
    samples = np.pad(samples, (0, max(0, 1 - first - samples.size)))
    return np.concatenate([samples[-first:0:-1], samples])


def can_be_read_twice(source: AudioSource) -> bool:
    """Return whether a source can be read twice: an array, a regular file's path, or a reopened file."""
    if isinstance(source, np.ndarray | ReopenedFile):
        return True
    return isinstance(source, str | os.PathLike) and str(source) != "-" and Path(source).is_file()
