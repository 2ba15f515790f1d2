"""Lock files: only one process at a time writes an output or uses a work folder.

The lock is `flock` on the file, not the existence of the file. It is also effective between containers that
share a volume, and the system releases it whenever the process ends. A lock file that a killed process left
behind is removed by the next process that acquires and releases the lock.
"""

import errno
import logging
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from whisperport.system.atomic import repeat_if_interrupted
from whisperport.system.system_error import FULL, no_temporary_space

log = logging.getLogger(__name__)

RETRY_S = 0.2  # time to retry: `is_locked` holds a lock briefly; a writer holds it longer than this
PAUSE_S = 0.01  # between two attempts
TEMPORARY = "whisperport-temporary-"  # start of a folder's name, before 16 digits of base 16
UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


@dataclass(slots=True)
class Lock:
    """A lock that is held until `release` is called or the process ends.

    Attributes:
        path: path of the lock file.
        file: the open lock file.
        is_exclusive: False if the file system has no locks, so that other processes may write as well.
    """

    path: Path
    file: BinaryIO
    is_exclusive: bool

    def release(self) -> None:
        """Remove the lock file, and then release the lock."""
        try:
            if os.name != "nt":
                repeat_if_interrupted(self._remove)
        finally:
            self.file.close()
        if os.name == "nt":  # Windows cannot remove an open file
            with suppress(OSError):
                if not self.path.stat().st_size:
                    self.path.unlink()

    def _remove(self) -> None:
        # A file that is not empty is no lock file of whisperport, although it has the name of one.
        if _is_current(self.file, self.path) and not os.fstat(self.file.fileno()).st_size:
            with suppress(OSError):  # the next holder removes it; what was written is not affected
                self.path.unlink()


def lock_path(output: Path) -> Path:
    """Return the path of the lock file of an output or a work folder."""
    return output.with_name(f".{output.name}.whisperport-lock")


def try_lock(path: Path) -> Lock | None:
    """Acquire the lock; return None if another process holds it. The folder must exist.

    Raises:
        OSError: the lock file cannot be created or opened.
    """
    try:
        return _acquire(path, os.O_CREAT)
    except BaseException:
        with suppress(OSError):
            is_locked(path)  # removes the lock file, unless another process holds the lock
        raise


@contextmanager
def locked(path: Path) -> Iterator[Lock | None]:
    """Acquire the lock as `try_lock` does, and release it at the end of the `with` block."""
    lock = try_lock(path)
    try:
        yield lock
    finally:
        if lock:
            lock.release()


@contextmanager
def waiting_for_lock(path: Path, on_wait: Callable[[], object]) -> Iterator[None]:
    """Hold the lock in the `with` block; wait as long as another process holds it.

    Args:
        path: the lock file. Its folder must exist.
        on_wait: called once, if another process holds the lock.

    Raises:
        OSError: the lock file cannot be created or opened.
    """
    lock = try_lock(path)
    if lock is None:
        on_wait()
    while lock is None:
        lock = try_lock(path)  # tries for `RETRY_S`, so this loop does not spin
    try:
        yield
    finally:
        lock.release()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder for temporary files, which only this user may read; it is deleted at the end.

    A process that is killed leaves its folder behind; the next one that needs such a folder deletes it.

    Raises:
        WhisperportError: the disk is full, also if the `with` block finds that.
    """
    parent = Path(tempfile.gettempdir())
    try:
        with _temporary_folder(parent) as folder:
            yield folder
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise no_temporary_space(parent, str(error)) from error


@contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    folder = parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    with locked(lock_path(folder)) as lock:  # before the folder is there
        if lock and lock.is_exclusive:
            for path in parent.glob(TEMPORARY + 16 * "[0-9a-f]"):
                with suppress(OSError):  # it belongs to another user
                    if not is_locked(lock_path(path)):
                        shutil.rmtree(path, ignore_errors=True)
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock. Removes a lock file that a killed process left behind.

    Raises:
        OSError: the lock file exists and cannot be opened.
    """
    try:
        lock = _acquire(path, 0)
    except FileNotFoundError:
        return False
    if lock is None:
        return True
    lock.release()
    return False


def _acquire(path: Path, flags: int) -> Lock | None:
    """Acquire the lock, with retries for `RETRY_S` seconds."""
    end = time.monotonic() + RETRY_S
    while True:
        lock = _attempt(path, flags)
        if lock or time.monotonic() > end:
            return lock
        time.sleep(PAUSE_S)


def _attempt(path: Path, flags: int) -> Lock | None:
    """Try once to acquire the lock; None also if the file was removed between opening and locking it."""

    def opener(name: str, _: int) -> int:
        no_follow = getattr(
            os, "O_NOFOLLOW", 0
        )  # a symbolic link could point to any file of the user
        return os.open(name, os.O_RDWR | flags | no_follow, 0o666)

    file = open(path, "r+b", buffering=0, opener=opener)  # noqa: SIM115  # the lock keeps it open
    try:
        lock = Lock(path, file, _try_flock(file))
        if _is_current(file, path):
            return lock
    except BlockingIOError:
        pass
    except BaseException:
        file.close()
        raise
    file.close()
    return None


def _try_flock(file: BinaryIO) -> bool:
    """Lock the file; return False if the file system has no locks.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    try:
        _flock(file.fileno())
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        log.warning(
            "%s: this file system has no locks; do not let two processes write here together",
            file.name,
        )
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
    """Return whether the path still names the open file. The previous holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except FileNotFoundError:
        return False
