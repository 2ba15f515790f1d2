"""Renames that never overwrite, and one that lets two folders change places in a single step.

Linux has both, as flags of `renameat2` (kernel 3.15, glibc 2.28). Elsewhere, and on file systems
without them, `exchange` says that it cannot, and `rename_if_free` asks before it renames.
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


def exchange(one: Path, other: Path) -> bool:
    """Swap what two paths name, in one step; False: this system cannot.

    Raises:
        OSError: it can, and failed.
    """
    return _renameat2(one, other, RENAME_EXCHANGE)


def rename_if_free(source: Path, destination: Path) -> bool:
    """Rename a folder unless there is something at its destination; whether it was renamed.

    Raises:
        OSError: it could not be renamed for another reason.
    """
    try:
        if _renameat2(source, destination, RENAME_NOREPLACE):
            return True
        if os.path.lexists(destination):
            return False
        os.rename(source, destination)  # a folder replaces nothing but an empty folder
    except OSError as error:
        if error.errno not in OCCUPIED:
            raise
        return False
    return True


def _renameat2(source: Path, destination: Path, flags: int) -> bool:
    """False: not supported here."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # a C library without it
        return False
    if call(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(destination), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(destination))
