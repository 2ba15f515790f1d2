"""What a path leads to where it is no regular file: a pipe may block its reader, a device has no end."""

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
    """What it is, such as "a folder" or "a pipe"; empty for a regular file, and where there is nothing."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):  # ValueError: a zero byte in the name
        return ""
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), "")
