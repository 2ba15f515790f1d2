"""Errors of the operating system that no module handled, in the form of every other error; full disks."""

import errno
import math
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from whisperport.errors import WhisperportError, out_of_memory

FULL = {errno.ENOSPC, errno.EDQUOT}
# What to do where neither free space nor permissions help.
HINTS = {
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`), or write to another file system",
    errno.EROFS: "this file system is read-only: write to a folder on another one",
}
# numpy reports a short write without a reason. With less free space than this, the disk is the reason.
NEARLY_FULL_BYTES = 2**20


def system_error(error: OSError) -> WhisperportError:
    """Return the error to report for an error of the operating system."""
    if not _has_working_directory():
        return WhisperportError(
            "the working directory does not exist any more",
            why="it was deleted, or its disk was unmounted, after the shell entered it",
            hint="`cd` to another folder",
        )
    if lack := out_of_memory(error):
        return lack
    hint = HINTS.get(
        error.errno or 0,
        "check the free space, the permissions and the disk, and that no file was changed meanwhile",
    )
    if error.errno in FULL:
        hint = "free some space on the disk"
        with suppress(OSError):  # there is no temporary folder
            hint += f"; temporary files are in {tempfile.gettempdir()}, or in the folder that TMPDIR names"
    return WhisperportError(
        "the operating system could not read or write a file", why=str(error), hint=hint
    )


def unopenable(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return `why` and `hint` of an error if libraries, which take a path as UTF-8, cannot open it.

    Empty: they can. They get it with links resolved.
    """
    path = os.fspath(path).replace("\0", "")
    with suppress(OSError):  # the working directory does not exist any more
        path = os.path.realpath(path)
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8" and not path.isascii():
        return {
            "why": f"its path is not ASCII, and the locale's encoding is {encoding}, not UTF-8",
            "hint": "set PYTHONUTF8=1, or a locale with UTF-8, such as LC_ALL=C.UTF-8",
        }
    try:
        path.encode()
    except UnicodeEncodeError:
        return {
            "why": "its path has bytes that are not UTF-8, and the libraries that open it take text",
            "hint": "rename the file, or the folder that has such a name",
        }
    return {}


def is_of_stream(message: str) -> bool:
    """Return whether a message is C++'s for a file that could not be read or written; it has no reason."""
    return "iostream" in message


def no_temporary_space(folder: Path, why: str) -> WhisperportError:
    """Return the error to report if the disk of the folder of temporary files is full."""
    return WhisperportError(
        f"the disk of the temporary files, in {folder}, is full",
        why=why,
        hint="free some space there, or set TMPDIR to a folder on another disk",
    )


def lack_of_space(folder: Path, needed_bytes: int) -> str:
    """Return why the disk of a folder has no room for some bytes; empty: it has.

    A part of a megabyte that is needed counts as one, and one that is free as none.
    """
    free = shutil.disk_usage(folder).free
    if free >= needed_bytes:
        return ""
    return f"{math.ceil(needed_bytes / 1e6)} MB are needed; {free // 10**6} MB are free"


def _has_working_directory() -> bool:
    try:
        return bool(os.getcwd())
    except OSError:
        return False
