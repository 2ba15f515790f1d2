"""Lock files: one process at a time writes an output, or uses a work folder.

The lock is `flock`, not the file: it also holds between containers that share a volume, and the
system releases it when its process dies, however that happens. Whoever takes a lock file that a
killed process has left behind removes it on release.
"""

import errno
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from whisperport.atomic import repeat_if_interrupted

log = logging.getLogger(__name__)

PATIENCE_S = 0.2  # `is_locked` holds a lock for a moment; longer than that, and it is a writer
PAUSE_S = 0.01
UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


@dataclass(slots=True)
class Lock:
    """A lock that is held until `release`, or until the process ends."""

    path: Path
    file: BinaryIO
    is_exclusive: bool  # False: the file system has no locks, so others may write as well

    def release(self) -> None:
        """Remove the lock file, then let go of the lock: a file without a lock is a leftover."""
        try:
            if os.name != "nt":
                repeat_if_interrupted(self._remove)
        finally:
            self.file.close()
        if os.name == "nt":  # which does not remove open files
            with suppress(OSError):
                self.path.unlink(missing_ok=True)

    def _remove(self) -> None:
        if _is_current(self.file, self.path):
            self.path.unlink(missing_ok=True)


def lock_path(output: Path) -> Path:
    """The lock file that belongs to an output or a work folder."""
    return output.with_name(f".{output.name}.whisperport-lock")


def try_lock(path: Path) -> Lock | None:
    """Take the lock, or return None if another process holds it. The folder must exist.

    Raises:
        OSError: the lock file cannot be created or opened.
    """
    try:
        return _patiently(path, os.O_CREAT)
    except BaseException:
        with suppress(OSError):
            is_locked(path)  # removes the file, unless it is another's
        raise


@contextmanager
def locked(path: Path) -> Iterator[Lock | None]:
    """`try_lock` for a `with` statement; releases the lock at its end."""
    lock = try_lock(path)
    try:
        yield lock
    finally:
        if lock:
            lock.release()


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock now. Removes a lock file that a killed process has left.

    Raises:
        OSError: the lock file exists and cannot be opened.
    """
    try:
        lock = _patiently(path, 0)
    except FileNotFoundError:
        return False
    if lock is None:
        return True
    lock.release()
    return False


def _patiently(path: Path, flags: int) -> Lock | None:
    end = time.monotonic() + PATIENCE_S
    while True:
        lock = _attempt(path, flags)
        if lock or time.monotonic() > end:
            return lock
        time.sleep(PAUSE_S)


def _attempt(path: Path, flags: int) -> Lock | None:
    """One attempt; None also if the file was removed between opening and locking it."""

    def opener(name: str, _: int) -> int:
        no_follow = getattr(os, "O_NOFOLLOW", 0)  # a link could name any file of the user's
        return os.open(name, os.O_RDWR | flags | no_follow, 0o666)

    file = open(path, "r+b", buffering=0, opener=opener)  # noqa: SIM115  # the lock keeps it open
    try:
        lock = Lock(path, file, _take(file))
        if _is_current(file, path):
            return lock
    except BlockingIOError:
        pass
    except BaseException:
        file.close()
        raise
    file.close()
    return None


def _take(file: BinaryIO) -> bool:
    """True: locked. False: the file system has no locks. Raises BlockingIOError if another has it."""
    try:
        _flock(file.fileno())
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        log.warning("%s: this file system has no locks; do not write here twice at once", file.name)
        return False
    return True


if sys.platform == "win32":
    import msvcrt

    def _flock(descriptor: int) -> None:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(*error.args) from error

else:
    import fcntl

    def _flock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_current(file: BinaryIO, path: Path) -> bool:
    """Whether the path still names the file that is open: its last holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except FileNotFoundError:
        return False
