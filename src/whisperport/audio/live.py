"""Sound that is still being made: each piece as soon as it is there, from a pipe, or a file played."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from whisperport.audio.callback_file import read_waiting
from whisperport.audio.decode import AudioDecoder, open_source
from whisperport.audio.load import iter_audio
from whisperport.audio.mel_windows import can_be_read_twice
from whisperport.audio.pcm import SAMPLE_RATE, check_length
from whisperport.audio.raw import from_raw
from whisperport.errors import AudioError

PIECE_S = 0.1  # seconds of sound in a piece; a pipe's may be shorter
_CHUNK = 1 << 16  # bytes asked for at most; a pipe gives what it has

Pieces = Iterator[NDArray[np.float32]]


def live_audio(source: str | os.PathLike[str] | BinaryIO, *, raw_rate: int | None = None) -> Pieces:
    """Pieces (n,) float32 of a sound, mono at 16 kHz, as they come.

    A file on disk is played: its pieces come when they would be heard. A pipe is read as it grows;
    containers that state their length first, such as mp4, cannot come by one.

    Args:
        source: a path, "-" for standard input, or a binary file object.
        raw_rate: the source is signed 16-bit little-endian mono samples at this rate, in Hz;
            None: a container that FFmpeg knows.

    Raises:
        AudioError: missing, unreadable, or no sound; while iterating, where it fails later.
    """
    if isinstance(source, str | os.PathLike) and can_be_read_twice(source):
        pieces = iter_audio(source, block_s=PIECE_S) if raw_rate is None else _raw(source, raw_rate)
        return in_real_time(pieces)
    return _decoded(source) if raw_rate is None else _raw(source, raw_rate)


def in_real_time(
    pieces: Iterable[NDArray[np.float32]],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Pieces:
    """Pieces at the pace of the sound: each when its last sample would be heard."""
    start, heard = clock(), 0
    for piece in pieces:
        heard += piece.size
        sleep(max(0.0, start + heard / SAMPLE_RATE - clock()))
        yield piece


def _decoded(source: str | os.PathLike[str] | BinaryIO) -> Pieces:
    with AudioDecoder(source) as decoder:
        yield from decoder.pieces(PIECE_S)


def _raw(source: str | os.PathLike[str] | BinaryIO, rate: int) -> Pieces:
    file, name, must_close = open_source(source)
    n_samples = 0
    try:
        for piece in from_raw(_chunks(file, name), rate):
            n_samples += piece.size
            yield piece
    finally:
        if must_close:
            file.close()
    check_length(n_samples, name)


def _chunks(file: BinaryIO, name: str) -> Iterator[bytes]:
    size = round(PIECE_S * SAMPLE_RATE) * 2 if file.seekable() else _CHUNK
    while True:
        try:
            chunk = read_waiting(file, size)
        except (OSError, ValueError) as error:  # ValueError: it was closed
            raise AudioError(f"{name} can be read no further", why=str(error)) from error
        if not chunk:
            return
        yield chunk
