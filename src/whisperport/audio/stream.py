"""Sound read forward in windows, from a file, a pipe or an array, in bounded memory."""

import os
from collections.abc import Iterator
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from whisperport.audio.decode import AudioDecoder
from whisperport.audio.pcm import SAMPLE_RATE, from_array

AudioSource = str | os.PathLike[str] | BinaryIO | NDArray[Any]


class AudioStream:
    """A sound of any length, of which a reader sees one window at a time.

        kept:      [ look_back_s before the furthest start | the samples read since ]
        dropped:   everything before
        not yet:   decoded when a read reaches for it

    Positions are counted in samples from the beginning of the sound, so a reader may step by
    what it understood (a timestamp within the window) rather than by whole windows. A sound that
    is still growing, such as a pipe, blocks in `read` until the window is full or the sound ends.

    Args:
        source: a path, "-" for standard input, a binary file object, or an array.
        sample_rate: of an array, in Hz; None: 16 kHz. Files state their own.
        look_back_s: how far before the furthest `start` a later read may begin.

    Raises:
        AudioError: see `AudioDecoder` and `from_array`.
    """

    def __init__(
        self, source: AudioSource, *, sample_rate: int | None = None, look_back_s: float = 30.0
    ) -> None:
        self._look_back = round(look_back_s * SAMPLE_RATE)
        self._decoder: AudioDecoder | None = None
        self._pieces: Iterator[NDArray[np.float32]]
        self.duration_s: float | None  # for progress; None where it is not known beforehand
        if isinstance(source, np.ndarray):
            samples = from_array(source, sample_rate)
            self._pieces, self.duration_s = iter((samples,)), samples.size / SAMPLE_RATE
        elif sample_rate is not None:
            raise ValueError("`sample_rate` is for arrays; a file states its own")
        else:
            self._decoder = AudioDecoder(source)
            self._pieces, self.duration_s = self._decoder.pieces(), self._decoder.duration_s
        self._kept = np.empty(0, np.float32)
        self._kept_from = 0  # position of the first sample kept
        self.ended = False  # whether the end of the sound was reached

    @property
    def n_decoded(self) -> int:
        """Samples decoded so far; the length of the sound once `ended`."""
        return self._kept_from + self._kept.size

    def read(self, start: int, n_samples: int) -> NDArray[np.float32]:
        """Samples `start` to `start + n_samples`, fewer at the end of the sound, none after it.

        Returns:
            (n,) float32 within [-1, 1], n <= n_samples; a copy.

        Raises:
            ValueError: `start` is before what is kept (see `look_back_s`).
            AudioError: the sound proves damaged, or shorter than one mel frame.
        """
        if start < self._kept_from or n_samples < 0:
            raise ValueError(
                f"cannot read {n_samples} samples from {start}: those before {self._kept_from} "
                "are gone; raise `look_back_s`"
            )
        self._decode_to(start + n_samples, keep_from=start - self._look_back)
        offset = start - self._kept_from
        return self._kept[offset : offset + n_samples].copy()

    def close(self) -> None:
        if self._decoder is not None:
            self._decoder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _decode_to(self, stop: int, *, keep_from: int) -> None:
        parts, kept_from, end = [self._kept], self._kept_from, self.n_decoded
        while True:
            # Dropped as early as possible: a reader may skip an hour ahead.
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
        # A fresh array even for one part: a view would keep what was dropped alive.
        self._kept = np.concatenate(parts) if parts else np.empty(0, np.float32)
        self._kept_from = kept_from
