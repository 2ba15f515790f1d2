"""A file that FFmpeg reads through callbacks, in which no exception is lost."""

import os
import select
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import BinaryIO


class CallbackFile:
    """What PyAV opens in place of the file itself.

    PyAV calls `read` and `seek` from inside FFmpeg. It drops a KeyboardInterrupt that is raised there,
    and FFmpeg goes on; other exceptions may be overtaken by FFmpeg's own. Here the first exception is
    remembered, the file is at its end from then on, and the exception is raised again as soon as
    PyAV's function returns: call those functions inside of `with file.calls():`.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._error: BaseException | None = None
        self.name = str(getattr(file, "name", ""))  # FFmpeg looks at its suffix
        # PyAV calls `send`, which is not written in Python, so that an interrupt that is due when the
        # callback begins is raised inside of the generator's `try`, not before a function's first line.
        answers = self._answers()
        next(answers)
        self.read = answers.send

    def seekable(self) -> bool:
        return is_seekable(self._file)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """The new position, or -1, by which FFmpeg knows that it failed."""
        try:
            return self._file.seek(offset, whence)
        except BaseException as error:
            self._error = self._error or error
            return -1

    def tell(self) -> int:
        return self._file.tell()

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Raises what a callback raised meanwhile, in place of what PyAV made of it."""
        try:
            yield
        finally:
            if self._error is not None:
                raise self._error

    def _answers(self) -> Generator[bytes, int, None]:
        """Bytes for each size that is sent; none after an error."""
        data = b""
        try:
            while True:
                size = yield data
                data = read_waiting(self._file, size)
                if len(data) > size:  # PyAV would write beyond its buffer
                    raise ValueError(f"{len(data)} bytes were read where {size} were asked for")
        except GeneratorExit:
            raise
        except BaseException as error:
            self._error = self._error or error
        while True:
            yield b""


def read_waiting(file: BinaryIO, size: int) -> bytes:
    """At most `size` bytes, at least one before the end; waits where the file does not by itself."""
    read = getattr(file, "read1", file.read)  # of a buffered pipe: what there is, without waiting
    data: bytes | None = read(size)
    while data is None:  # an empty pipe that another process has set to O_NONBLOCK
        select.select([file], [], [])
        data = read(size)
    return data


def is_seekable(file: BinaryIO) -> bool:
    seekable = getattr(file, "seekable", None)
    return bool(seekable and seekable())
