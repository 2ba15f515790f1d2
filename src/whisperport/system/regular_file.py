"""Paths that are not regular files: reading a pipe can block, and a device has no end."""

import errno
import os
import stat
from pathlib import Path

MAX_TEXT_BYTES = (
    2**24
)  # of a text that a person wrote: the words of a hundred hours of speech are 6 MB

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


def read_short_text(path: str | os.PathLike[str], encoding: str = "utf-8") -> str:
    """Return the text of a file, or of a pipe such as `<(command)`; a device without an end ends here too.

    Raises:
        OSError: it cannot be read, or has more than `MAX_TEXT_BYTES`.
        UnicodeDecodeError: it is not of this encoding.
    """
    with Path(path).open("rb") as file:
        content = file.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_TEXT_BYTES} bytes", os.fspath(path))
    return content.decode(encoding)
