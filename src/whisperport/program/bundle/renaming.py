"""Rename a folder without overwriting anything, and exchange two folders in one step.

Linux supports both as flags of `renameat2` (kernel 3.15, glibc 2.28). On other systems, and on file
systems without them, `exchange` returns False, and `rename_if_free` checks the destination first.
"""

import ctypes
import errno
import os
import sys
from pathlib import Path

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
