"""Atomic writes and renames: completely or not at all, and nothing is overwritten by mistake.

Linux renames a folder without overwriting, and exchanges two in one step, as flags of `renameat2` (kernel
3.15, glibc 2.28). On other systems, and on file systems without them, `exchange` returns False, and
`rename_if_free` checks the destination first.
"""

import ctypes
import errno
import hashlib
import logging
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from io import BufferedWriter
from pathlib import Path

from whisperport.errors import WhisperportError
from whisperport.system.system_error import HINTS

log = logging.getLogger(__name__)

TEMPORARY = re.compile(r"\..{1,40}\.[0-9a-f]{12}\.tmp", re.DOTALL)


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path`. A reader sees either the old file or the complete new one.

    The data goes to a temporary file in the same folder, which is flushed to the disk and then renamed. On
    Linux this file has no name before it is complete: a killed process leaves nothing of it, or, right
    before the rename, a complete file, which the next writer of `path` deletes. Symbolic links are
    followed. The new file has the permissions of the file that it replaces. After any failure, including an
    interrupt, the old file is unchanged and the temporary file is deleted.

    Raises:
        WhisperportError: the folder is missing, the disk is full, writing is not permitted, or `path`
            is a folder or a device.
    """
    try:
        target = Path(os.path.realpath(path))
        old = target.stat() if target.exists() else None
        if old and not stat.S_ISREG(old.st_mode):
            raise WhisperportError(
                f"cannot write `{path}`",
                why="it is a folder or a device",
                hint="give the path of a file",
            )
        _replace(target, data, stat.S_IMODE(old.st_mode) if old else None)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        folder = Path(path).parent
        hint = HINTS.get(getattr(error, "errno", None) or 0, "")
        hint = hint if os.path.isdir(folder) else f"create the folder first: {folder}"
        raise WhisperportError(
            f"cannot write `{path}`",
            why=getattr(error, "strerror", None) or str(error),
            hint=hint or "check the free space and the permissions; the old file is unchanged",
        ) from error
    flush_rename(target)


def clear_temporaries(folder: Path) -> None:
    """Delete the temporary files that killed calls of `write_atomic` left in a folder.

    The caller makes sure that no other process writes to this folder at the same time.

    Raises:
        OSError: the folder cannot be read, or a file cannot be deleted.
    """
    for entry in list(os.scandir(folder)):
        if TEMPORARY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            os.unlink(entry.path)


def repeat_if_interrupted(clean_up: Callable[[], None]) -> None:
    """Call `clean_up`; if Ctrl-C interrupts it, call it a second time and then raise the interrupt."""
    try:
        clean_up()
    except BaseException:
        clean_up()
        raise


def _replace(target: Path, data: bytes, mode: int | None) -> None:
    """Write a temporary file and rename it; `mode`: permissions of the old file, None: there is none."""
    if _replace_by_unnamed(target, data, mode):
        return
    # Not `tempfile`: only the owner may read its files, so the umask would have no effect on them.
    temporary = _temporary(target, secrets.token_hex(6))
    try:
        with open(temporary, "xb") as file:
            _fill(file, data, mode)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _replace_by_unnamed(target: Path, data: bytes, mode: int | None) -> bool:
    """Replace a file by one that has no name before it is complete, so that a kill leaves nothing of it.

    Its name then follows from that of the target. It is locked, so that the next writer of the target can
    tell a file that a killed process left from one whose writer still runs.

    Returns:
        False if the system does not support this; then nothing has changed.
    """
    try:
        descriptor = os.open(target.parent, os.O_WRONLY | os.O_TMPFILE, 0o666)
    except (AttributeError, OSError):  # only Linux has such files, and not on every file system
        return False
    temporary = _temporary(target, hashlib.sha256(os.fsencode(target.name)).hexdigest()[:12])
    with open(descriptor, "wb") as file:
        _fill(file, data, mode)
        _delete_if_abandoned(temporary)
        try:
            _lock(descriptor)
            try:  # with a descriptor of a folder, Python calls `linkat`, which follows the link in /proc
                os.link(f"/proc/self/fd/{descriptor}", temporary, src_dir_fd=descriptor)
            except OSError:  # /proc is not mounted, or another process writes the same file
                return False
            os.replace(temporary, target)
        except BaseException:
            _unlink_if_same(temporary, descriptor)
            raise
    return True


def _temporary(target: Path, digits: str) -> Path:
    return target.with_name(f".{target.name[:40]}.{digits}.tmp")


def _fill(file: BufferedWriter, data: bytes, mode: int | None) -> None:
    file.write(data)
    file.flush()
    # Not where the mode is right already: a FAT disk allows no change.
    if mode is not None and stat.S_IMODE(os.fstat(file.fileno()).st_mode) != mode:
        os.chmod(file.fileno() if os.chmod in os.supports_fd else file.name, mode)
    os.fsync(file.fileno())


def _delete_if_abandoned(temporary: Path) -> None:
    """Delete a temporary file unless its writer still runs."""
    try:
        descriptor = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # there is none
        return
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and _lock(descriptor):
            _unlink_if_same(temporary, descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock a file until it is closed; return False if another process has, or there are no locks here."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _unlink_if_same(path: Path, descriptor: int) -> None:
    """Delete a file if it is the open one, and not one of the same name that another process made."""
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), path.lstat()):
            path.unlink()


def flush_rename(path: Path) -> None:
    """Flush the folder of a path that was renamed; only warn if the disk reports an error."""
    try:
        flush_folder(path.parent)
    except OSError as error:
        log.warning("%s was written, but may be lost in a power failure: %s", path, error)


def flush_folder(folder: Path) -> None:
    """Flush a folder to the disk, so that a rename in it survives a power failure. POSIX systems only.

    Raises:
        OSError: the disk reports an error.
    """
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Source: include/uapi/linux/fs.h and include/uapi/linux/fcntl.h.
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
AT_FDCWD = -100
UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
OCCUPIED = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}


def exchange(first: Path, second: Path) -> bool:
    """Exchange two paths in one step.

    Returns:
        False if the system does not support this; then nothing has changed.

    Raises:
        OSError: the system supports it, and it failed.
    """
    return _renameat2(first, second, RENAME_EXCHANGE)


def rename_if_free(source: Path, destination: Path) -> bool:
    """Rename a folder unless its destination exists.

    Returns:
        Whether the folder was renamed.

    Raises:
        OSError: the folder could not be renamed for another reason.
    """
    try:
        if _renameat2(source, destination, RENAME_NOREPLACE):
            return True
        if os.path.lexists(destination):
            return False
        os.rename(source, destination)  # of a folder: it can replace only an empty folder
    except OSError as error:
        if error.errno not in OCCUPIED:
            raise
        return False
    return True


def _renameat2(source: Path, destination: Path, flags: int) -> bool:
    """Call Linux's `renameat2`; return False if the system or file system does not support it."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # the C library does not have it
        return False
    if call(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(destination), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(destination))
