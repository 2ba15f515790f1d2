"""Detection of paths that are not regular files: reading a pipe can block, and a device has no end."""

import os
import stat
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def other_kind(path: str | os.PathLike[str]) -> str:
    """Return the kind of a path that is not a regular file, such as "a folder" or "a pipe".

    Returns "" for a regular file and for a path that does not exist.
    """
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):  # ValueError: a NUL byte in the path
        return ""
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), "")
