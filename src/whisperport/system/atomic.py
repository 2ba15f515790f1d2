"""Atomic writes and renames: completely or not at all, and nothing is overwritten by mistake.

Linux renames a folder without overwriting, and exchanges two in one step, as flags of `renameat2` (kernel
3.15, glibc 2.28). On other systems, and on file systems without them, `exchange` returns False, and
`rename_if_free` checks the destination first.
"""

import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable
from io import BufferedWriter
from pathlib import Path

from whisperport.errors import WhisperportError

TEMPORARY = re.compile(r"\..{1,40}\.[0-9a-f]{12}\.tmp", re.DOTALL)


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path`. A reader sees either the old file or the complete new one.

    The data goes to a temporary file in the same folder, which is flushed to the disk and then renamed. On
    Linux this file has no name before it is complete: a killed process leaves nothing of it. Symbolic
    links are followed. The new file has the permissions of the file that it replaces. After any failure,
    including an interrupt, the old file is unchanged and the temporary file is deleted.

    Raises:
        WhisperportError: the folder is missing, the disk is full, writing is not permitted, or `path`
            is a folder or a device.
    """
    try:
        target = Path(os.path.realpath(path))
        temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(6)}.tmp")
        is_old = target.exists()
        if is_old and not stat.S_ISREG(target.stat().st_mode):
            raise WhisperportError(
                f"cannot write `{path}`",
                why="it is a folder or a device",
                hint="give the path of a file",
            )
        try:
            _write_through(temporary, data)
            if is_old:
                shutil.copymode(target, temporary)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        flush_folder(target.parent)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        folder = Path(path).parent
        hint = "" if os.path.isdir(folder) else f"create the folder first: {folder}"
        raise WhisperportError(
            f"cannot write `{path}`",
            why=getattr(error, "strerror", None) or str(error),
            hint=hint or "check the free space and the permissions; the old file is unchanged",
        ) from error


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


def _write_through(path: Path, data: bytes) -> None:
    if not _write_unnamed(path, data):
        # Not `tempfile`: only the owner may read its files, so the umask would have no effect on them.
        with open(path, "xb") as file:
            _fill(file, data)


def _write_unnamed(path: Path, data: bytes) -> bool:
    """Write a file that has no name before it is complete, so that a killed process leaves nothing of it.

    Returns:
        False if the system does not support this; then there is no file.
    """
    try:
        descriptor = os.open(path.parent, os.O_WRONLY | os.O_TMPFILE, 0o666)
    except (AttributeError, OSError):  # only Linux has such files, and not on every file system
        return False
    with open(descriptor, "wb") as file:
        _fill(file, data)
        try:  # with a descriptor of a folder, Python calls `linkat`, which follows the link in /proc
            os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor)
        except OSError:  # /proc is not mounted
            return False
    return True


def _fill(file: BufferedWriter, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


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
