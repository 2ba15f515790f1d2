"""Read windows of audio in order from a file, a pipe or an array, in bounded memory."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from whisperport.speech.audio.callback_file import ReopenedFile
from whisperport.speech.audio.pcm import SAMPLE_RATE, from_array

if TYPE_CHECKING:
    from whisperport.speech.audio import decode

PIECE = 2**16  # samples of an array that are read together

AudioSource = str | os.PathLike[str] | BinaryIO | ReopenedFile | NDArray[Any]


class AudioStream:
    """Audio of any duration, of which a window is read at a time.

        in memory   `look_back_s` before the largest `start`, and the samples after it that were read
        dropped     all samples before
        decoded     when a read needs them

    Positions are samples from the beginning of the audio, so a window may begin anywhere, for example at a
    timestamp within the previous window. If the source is a pipe, `read` waits until the window is full or
    the audio ends.

    Args:
        source: a path, "-" for standard input, a binary file object, or an array.
        sample_rate: sample rate of an array in Hz; None: 16 kHz. Must be None for files, which state it.
        look_back_s: how far before the largest `start` so far a later read may begin, in seconds.

    Attributes:
        duration_s: duration in seconds, for progress; None if the source does not state it.
        ended: whether the end of the audio was reached.

    Raises:
        AudioError: see `AudioDecoder` and `from_array`.
        ValueError: `sample_rate` is set for a file.
    """

    def __init__(
        self, source: AudioSource, *, sample_rate: int | None = None, look_back_s: float = 30.0
    ) -> None:
        self._look_back = round(look_back_s * SAMPLE_RATE)
        self._decoder: decode.AudioDecoder | None = None
        self._pieces: Iterator[NDArray[np.float32]]
        self.duration_s: float | None
        if isinstance(source, np.ndarray):
            samples = from_array(source, sample_rate)
            self._pieces, self.duration_s = _in_pieces(samples), samples.size / SAMPLE_RATE
        elif sample_rate is not None:
            raise ValueError("`sample_rate` is for arrays; a file states its sample rate")
        else:
            from whisperport.speech.audio.decode import AudioDecoder  # imports FFmpeg

            self._decoder = AudioDecoder(source)
            self._pieces, self.duration_s = self._decoder.pieces(), self._decoder.duration_s
        self._kept = np.empty(0, np.float32)
        self._kept_from = 0  # position of the first sample in memory
        self.ended = False

    @property
    def n_decoded(self) -> int:
        """Number of samples decoded so far; once `ended`, of all samples."""
        return self._kept_from + self._kept.size

    def read(self, start: int, n_samples: int) -> NDArray[np.float32]:
        """Return the samples `start` to `start + n_samples`; fewer at the end of the audio, none after it.

        Returns:
            (n,) float32 within [-1, 1], n <= n_samples; a copy.

        Raises:
            ValueError: the samples from `start` on were dropped (see `look_back_s`).
            AudioError: the audio is damaged, or shorter than one mel frame.
        """
        if start < self._kept_from or n_samples < 0:
            raise ValueError(
                f"cannot read {n_samples} samples from {start}: those before {self._kept_from} "
                "were dropped; increase `look_back_s`"
            )
        self._decode_to(start + n_samples, keep_from=start - self._look_back)
        offset = start - self._kept_from
        return self._kept[offset : offset + n_samples].copy()

    def close(self) -> None:
        """Close the source, unless the caller opened it."""
        if self._decoder is not None:
            self._decoder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _decode_to(self, stop: int, *, keep_from: int) -> None:
        """Decode up to sample `stop`, and drop the samples before `keep_from`."""
        parts, kept_from, end = [self._kept], self._kept_from, self.n_decoded
        while True:
            # Drop samples as early as possible: a read may begin an hour later.
            while parts and kept_from + parts[0].size <= keep_from:
                kept_from += parts.pop(0).size
            if end >= stop or self.ended:
                break
            piece = next(self._pieces, None)
            if piece is None:
                self.ended = True
            else:
                parts.append(piece)
                end += piece.size
        if parts and kept_from < keep_from:
            parts[0] = parts[0][keep_from - kept_from :]
            kept_from = keep_from
        # A new array even for one part: a view would keep the dropped samples in memory.
        self._kept = np.concatenate(parts) if parts else np.empty(0, np.float32)
        self._kept_from = kept_from


def _in_pieces(samples: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """Yield short views of an array: `read` copies the pieces that it keeps, so few samples are copied."""
    for start in range(0, max(samples.size, 1), PIECE):
        yield samples[start : start + PIECE]
