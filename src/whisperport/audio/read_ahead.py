"""Read sound in a thread of its own, so that none is missed while what came before is transcribed."""

import time
from collections.abc import Iterable
from queue import SimpleQueue
from threading import Thread

import numpy as np
from numpy.typing import NDArray

from whisperport.audio.pcm import SAMPLE_RATE

AHEAD_S = 600.0  # seconds of sound, 38 MB: a model that is as far behind does not catch up
_NAP_S = 0.05

Samples = NDArray[np.float32]


class ReadAhead:
    """Pieces of sound, gathered as they come; however long the reader was away, none is dropped.

    A source that runs far ahead, such as a file through a pipe, waits: memory stays bounded. The
    thread is a daemon: one that waits for a silent pipe does not keep the process alive.

    Args:
        ahead_s: seconds of sound that wait to be taken, or one piece more.
    """

    def __init__(self, pieces: Iterable[Samples], *, ahead_s: float = AHEAD_S) -> None:
        self._ahead = round(ahead_s * SAMPLE_RATE)
        self._n_read = self._n_taken = 0  # samples: each counted by one thread
        self._come: SimpleQueue[Samples | Exception | None] = SimpleQueue()  # None: the end
        self._stopped = False
        self._end: Exception | None = None
        self._ended = False
        Thread(target=self._read, args=(pieces,), daemon=True, name="sound").start()

    def take(self) -> Samples | None:
        """All that came since the last call, waiting for some; None at the end.

        Raises what the source raised, after everything before it was taken.
        """
        pieces: list[Samples] = []
        while not self._ended and not (pieces and self._come.empty()):
            item = self._come.get()
            if isinstance(item, np.ndarray):
                pieces.append(item)
            else:
                self._ended, self._end = True, item
        if pieces:
            taken = np.concatenate(pieces)
            self._n_taken += taken.size
            return taken
        if self._end is not None:
            raise self._end
        return None

    def stop(self) -> None:
        """Read no more; what has come can still be taken. May be called from a signal handler."""
        self._stopped = True
        self._come.put(None)

    def _read(self, pieces: Iterable[Samples]) -> None:
        try:
            for piece in pieces:
                if self._stopped:
                    return
                self._come.put(piece)
                self._n_read += piece.size
                while self._n_read - self._n_taken > self._ahead and not self._stopped:
                    time.sleep(_NAP_S)  # a lock could not be taken in a signal's handler
        except Exception as error:  # whatever it is, it belongs to the one who takes
            self._come.put(error)
        else:
            self._come.put(None)
