"""Detection of paths that are not regular files: reading a pipe can block, and a device has no end."""

import os
import stat
from pathlib import Path

from whisperport.errors import UsageError

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


def expect_not_input(
    out: str | os.PathLike[str], given: str | os.PathLike[str], flag: str = "--out"
) -> None:
    """Check that an output is another file than the input, also through links.

    Raises:
        UsageError: it is the same file.
    """
    try:
        is_same = os.path.samefile(out, given)
    except (OSError, ValueError):  # one does not exist, or a path has a NUL byte
        return
    if is_same:
        raise UsageError(
            f"`{flag} {os.fspath(out)}` is the input itself",
            why="it would be replaced, and the original program lost",
            hint=f"choose another name for `{flag}`",
        )
