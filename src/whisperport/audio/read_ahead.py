"""Read sound in a thread of its own, so that none is missed while what came before is transcribed."""

from collections.abc import Iterable
from queue import SimpleQueue
from threading import Thread

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]


class ReadAhead:
    """Pieces of sound, gathered as they come; however long the reader was away, none is dropped.

    The thread is a daemon: one that waits for a silent pipe does not keep the process alive.
    """

    def __init__(self, pieces: Iterable[Samples]) -> None:
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
            return np.concatenate(pieces)
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
        except Exception as error:  # whatever it is, it belongs to the one who takes
            self._come.put(error)
        else:
            self._come.put(None)
