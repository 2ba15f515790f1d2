"""Read audio in a separate thread, so that none is lost while earlier audio is transcribed."""

import time
from collections.abc import Iterable
from queue import SimpleQueue
from threading import Thread

import numpy as np
from numpy.typing import NDArray

from whisperport.speech.audio.pcm import SAMPLE_RATE

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
