"""Files that Python reads for FFmpeg: through callbacks, without losing exceptions."""

import os
import select
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import BinaryIO, Protocol, runtime_checkable


@runtime_checkable
class ReopenedFile(Protocol):
    """An audio file without a path that can be opened any number of times."""

    def reopen(self) -> BinaryIO:
        """Return a new file object, at the beginning; its reader closes it."""
        ...


class CallbackFile:
    """A file object for PyAV that keeps the first exception of a callback and raises it again.

    PyAV calls `read` and `seek` from inside FFmpeg. It drops a KeyboardInterrupt that is raised there, and
    FFmpeg continues; FFmpeg's own errors may replace other exceptions. This class stores the first
    exception and reports the end of the file from then on. Call PyAV's functions inside `with
    file.calls():`, which raises the stored exception when they return.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._error: BaseException | None = None
        self.name = str(getattr(file, "name", ""))  # FFmpeg looks at its suffix
        # `send` is not a Python function. An interrupt that is pending when the callback begins is
        # therefore raised inside the generator's `try`, not before the first line of a Python function.
        reader = self._reader()
        next(reader)
        self.read = reader.send

    def seekable(self) -> bool:
        return is_seekable(self._file)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position and return it, or return -1, which tells FFmpeg that the call failed."""
        try:
            return self._file.seek(offset, whence)
        except BaseException as error:
            self._error = self._error or error
            return -1

    def tell(self) -> int:
        return self._file.tell()

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Raise the exception that a callback raised inside the block, in place of PyAV's exception."""
        try:
            yield
        finally:
            if self._error is not None:
                raise self._error

    def _reader(self) -> Generator[bytes, int, None]:
        """Yield the bytes for each size that is sent, or no bytes after an error."""
        data = b""
        try:
            while True:
                size = yield data
                data = read_waiting(self._file, size)
                if len(data) > size:  # PyAV would write beyond its buffer
                    raise ValueError(
                        f"the file returned {len(data)} bytes, but {size} bytes were requested"
                    )
        except GeneratorExit:
            raise
        except BaseException as error:
            self._error = self._error or error
        while True:
            yield b""


def read_waiting(file: BinaryIO, size: int) -> bytes:
    """Read 1 to `size` bytes, or none at the end. Waits for data if the file itself does not wait."""
    read = getattr(file, "read1", file.read)  # `read1` of a buffered pipe returns what is there
    data: bytes | None = read(size)
    while data is None:  # an empty pipe that another process has set to O_NONBLOCK
        select.select([file], [], [])
        data = read(size)
    return data


def is_seekable(file: BinaryIO) -> bool:
    """Return whether a file object supports `seek`."""
    seekable = getattr(file, "seekable", None)
    return bool(seekable and seekable())
