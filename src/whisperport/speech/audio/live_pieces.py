"""Read audio piece by piece while it arrives from a pipe, or at real-time speed from a file.

`ReadAhead` does so in a separate thread, so that none is lost while earlier audio is transcribed.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from threading import Thread
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import AudioError
from whisperport.speech.audio.callback_file import read_waiting
from whisperport.speech.audio.decode import AudioDecoder, open_source
from whisperport.speech.audio.load import iter_audio
from whisperport.speech.audio.mel_windows import can_be_read_twice
from whisperport.speech.audio.pcm import SAMPLE_RATE, check_length
from whisperport.speech.audio.pcm_stream import from_raw

PIECE_S = 0.1  # duration of a piece in seconds; pieces of a pipe may be shorter
_CHUNK = 1 << 16  # maximum number of bytes in one read of a pipe

Pieces = Iterator[NDArray[np.float32]]


def live_audio(source: str | os.PathLike[str] | BinaryIO, *, raw_rate: int | None = None) -> Pieces:
    """Yield pieces (n,) float32 of the audio, mono at 16 kHz, as they arrive.

    A file on disk is read in real time: one second of audio takes one second. A pipe is read as data
    arrives. Containers with an index at the end, such as mp4, cannot be read from a pipe.

    Args:
        source: a path, "-" for standard input, or a binary file object.
        raw_rate: sample rate in Hz of headerless audio: signed 16-bit little-endian mono samples. None: the
            source is a format that FFmpeg knows.

    Raises:
        AudioError: the source is missing, cannot be read or has no audio. It may be raised while iterating.
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
    """Yield each piece at the time at which its last sample would have been recorded."""
    start, n_samples = clock(), 0
    for piece in pieces:
        n_samples += piece.size
        sleep(max(0.0, start + n_samples / SAMPLE_RATE - clock()))
        yield piece


def _decoded(source: str | os.PathLike[str] | BinaryIO) -> Pieces:
    """Yield pieces of a format that FFmpeg knows."""
    with AudioDecoder(source) as decoder:
        yield from decoder.pieces(PIECE_S)


def _raw(source: str | os.PathLike[str] | BinaryIO, rate: int) -> Pieces:
    """Yield pieces of headerless audio at `rate` Hz."""
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
    """Yield the bytes of a file as they arrive."""
    size = round(PIECE_S * SAMPLE_RATE) * 2 if file.seekable() else _CHUNK
    while True:
        try:
            chunk = read_waiting(file, size)
        except (OSError, ValueError) as error:  # ValueError: the file was closed
            raise AudioError(f"cannot read more of {name}", why=str(error)) from error
        if not chunk:
            return
        yield chunk


AHEAD_S = 600.0  # seconds of audio, 38 MB; a model that is this far behind does not catch up
_SLEEP_S = 0.05

Samples = NDArray[np.float32]


class ReadAhead:
    """Collects pieces of audio in a thread. No piece is dropped, however rarely `take` is called.

    If the source is far ahead, such as a file through a pipe, reading pauses, so memory is bounded. The
    thread is a daemon: while it waits for a silent pipe, the process can end.

    Args:
        pieces: (n,) float32 samples at 16 kHz.
        ahead_s: seconds of audio to collect before reading pauses. One piece more may be collected.
    """

    def __init__(self, pieces: Iterable[Samples], *, ahead_s: float = AHEAD_S) -> None:
        self._ahead = round(ahead_s * SAMPLE_RATE)
        self._n_read = self._n_taken = 0  # samples; each counter is changed by one thread
        self._arrived: SimpleQueue[Samples | Exception | None] = SimpleQueue()  # None: the end
        self._stopped = False
        self._end: Exception | None = None
        self._ended = False
        Thread(target=self._read, args=(pieces,), daemon=True, name="audio").start()

    def take(self) -> Samples | None:
        """Return all audio since the last call, (n,) float32; None at the end. Wait if there is none yet.

        An exception of the source is raised after all audio before it was returned.
        """
        pieces: list[Samples] = []
        while not self._ended and not (pieces and self._arrived.empty()):
            item = self._arrived.get()
            if isinstance(item, np.ndarray):
                pieces.append(item)
            else:
                self._ended, self._end = True, item
        if pieces:
            samples = np.concatenate(pieces)
            self._n_taken += samples.size
            return samples
        if self._end is not None:
            raise self._end
        return None

    def stop(self) -> None:
        """Stop reading. Collected audio can still be taken. May be called from a signal handler."""
        self._stopped = True
        self._arrived.put(None)

    def _read(self, pieces: Iterable[Samples]) -> None:
        """Collect the pieces. Runs in the thread."""
        try:
            for piece in pieces:
                if self._stopped:
                    return
                self._arrived.put(piece)
                self._n_read += piece.size
                while self._n_read - self._n_taken > self._ahead and not self._stopped:
                    time.sleep(_SLEEP_S)  # no lock: `stop` may run in a signal handler
        except Exception as error:  # any type; `take` raises it
            self._arrived.put(error)
        else:
            self._arrived.put(None)
