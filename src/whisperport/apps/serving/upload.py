"""An uploaded audio file: in memory if it is small, otherwise in one file without a name."""

import io
import os
from threading import Lock
from typing import Any, BinaryIO, cast


class Upload:
    """A file that several readers may read at the same time, each at its own position.

    Args:
        file: holds the data; with `fileno` if the data are in a file. The caller closes it after `close`.
        size: bytes.
    """

    def __init__(self, file: Any, size: int) -> None:
        self._file, self._size = file, size
        self._lock, self._closed = Lock(), False
        file.flush()  # readers read the descriptor, not the buffer
        rolled = getattr(file, "_rolled", True)  # False: a SpooledTemporaryFile in memory
        self._data: bytes | None = None if rolled else _all_of(file)

    def reopen(self) -> BinaryIO:
        """Return a new reader, at the beginning.

        Raises:
            ValueError: the upload was closed.
        """
        with self._lock:
            if self._closed:
                raise ValueError("the upload was closed")
            if self._data is not None:
                return io.BytesIO(self._data)
            raw = _Positioned(os.dup(self._file.fileno()), self._size)
        return cast(BinaryIO, io.BufferedReader(raw))

    def close(self) -> None:
        """Let no further reader begin. Those that exist go on: they have descriptors of their own."""
        with self._lock:
            self._closed, self._data = True, None


class _Positioned(io.RawIOBase):
    """Reads a descriptor at a position of its own; closes it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor, self._size, self._at = descriptor, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = os.pread(self._descriptor, len(buffer), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("negative position")
        self._at = base + offset
        return self._at

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def _all_of(file: Any) -> bytes:
    file.seek(0)
    data: bytes = file.read()
    return data
