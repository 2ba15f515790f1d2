"""Write a file completely or not at all."""

import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from whisperport.errors import WhisperportError

TEMPORARY = re.compile(r"\..{1,40}\.[0-9a-f]{12}\.tmp", re.DOTALL)


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path`; whoever reads sees the old file or the new one, never a part.

    A temporary file in the same folder is filled, flushed to the disk and renamed. A link is
    followed, and a file that is replaced keeps its permissions. On any failure, an interrupt
    among them, the old file is untouched and nothing is left beside it.

    Raises:
        WhisperportError: the folder is missing, the disk full, writing not permitted, or `path`
            is a folder or a device.
    """
    try:
        target = Path(os.path.realpath(path))
        temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(6)}.tmp")
        is_old = target.exists()
        if is_old and not stat.S_ISREG(target.stat().st_mode):
            raise WhisperportError(
                f"cannot write `{path}`", why="it is a folder or a device", hint="name a file"
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
            hint=hint or "check the free space and the permissions; the old file is untouched",
        ) from error


def clear_temporaries(folder: Path) -> None:
    """Delete what killed calls of `write_atomic` have left in a folder where nobody else writes now.

    Raises:
        OSError: the folder cannot be read, or a file cannot be deleted.
    """
    for entry in list(os.scandir(folder)):
        if TEMPORARY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            os.unlink(entry.path)


def repeat_if_interrupted(tidy: Callable[[], None]) -> None:
    """Tidy up, and again from the start if Ctrl-C arrives during it, before passing that on."""
    try:
        tidy()
    except BaseException:
        tidy()
        raise


def _write_through(path: Path, data: bytes) -> None:
    # Not `tempfile`: its files are private, and the result would be too, whatever the umask.
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Make a rename in a folder survive a power cut; only POSIX lets a folder be opened for it.

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
