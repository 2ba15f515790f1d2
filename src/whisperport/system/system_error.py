"""An error of the operating system that no module handled, in the form of every other error."""

import errno
import os
import tempfile
from contextlib import suppress

from whisperport.errors import WhisperportError

FULL = {errno.ENOSPC, errno.EDQUOT}


def system_error(error: OSError) -> WhisperportError:
    """Return the error to report for an error of the operating system."""
    if not _has_working_directory():
        return WhisperportError(
            "the working directory does not exist any more",
            why="it was deleted, or its disk was unmounted, after the shell entered it",
            hint="`cd` to another folder",
        )
    hint = (
        "check the free space, the permissions and the disk, and that no file was changed meanwhile"
    )
    if error.errno in FULL:
        hint = "free some space on the disk"
        with suppress(OSError):  # there is no temporary folder
            hint += f"; temporary files are in {tempfile.gettempdir()}, or in the folder that TMPDIR names"
    return WhisperportError(
        "the operating system could not read or write a file", why=str(error), hint=hint
    )


def _has_working_directory() -> bool:
    try:
        return bool(os.getcwd())
    except OSError:
        return False
