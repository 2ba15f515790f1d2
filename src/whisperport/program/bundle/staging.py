"""Hidden folders beside an output, in which a bundle is prepared before it is moved to the output.

    parent of the output/
    ├── .NAME.whisperport-lock   held while NAME is written
    ├── .NAME.partial-TOKEN      all files are written here
    ├── .NAME.discarded-TOKEN    is exchanged with NAME in one step; afterwards it is the old bundle
    ├── .NAME.replaced-TOKEN     the old bundle, where the system cannot exchange folders in one step
    ├── .NAME.files-TOKEN        the old files, while an output of several files is moved to its place
    └── NAME

At the end of the `with` statement all hidden folders are deleted, also after an error. SIGKILL and a
power failure leave them behind. The next process that holds the lock deletes them, since their writer no
longer runs, or moves the old bundle or files back if NAME is missing.
"""

import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from whisperport.errors import BundleError, WhisperportError
from whisperport.program.bundle.ownership import delete_listed
from whisperport.program.bundle.replacing_files import restore_files
from whisperport.system.atomic import rename_if_free, repeat_if_interrupted
from whisperport.system.locking import is_locked, lock_path, locked

log = logging.getLogger(__name__)

KINDS = ("partial", "discarded", "replaced", "files")
TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class Staging:
    """The hidden folders of one writer of `out`."""

    out: Path
    token: str

    @property
    def partial(self) -> Path:
        """Folder that is never moved to the output; its files may be deleted at any time."""
        return self._beside("partial")

    @property
    def discarded(self) -> Path:
        """Folder that may have been at the output; deleted file by file, to keep files of the user."""
        return self._beside("discarded")

    @property
    def replaced(self) -> Path:
        """The old bundle; moved back if there is nothing at the output."""
        return self._beside("replaced")

    @property
    def files(self) -> Path:
        """The old files of an output of several files; moved back unless all new ones are in place."""
        return self._beside("files")

    def _beside(self, kind: str) -> Path:
        return self.out.with_name(f".{self.out.name}.{kind}-{self.token}")

    def exists(self) -> bool:
        """Whether any of the folders exists."""
        return any(_is_folder(self._beside(kind)) for kind in KINDS)

    def clear(self) -> None:
        """Delete all hidden folders, move the old bundle back if needed, and keep files of the user.

        The result depends only on what is on the disk, so this may be called at any time and repeatedly.
        """
        try:
            if _is_folder(self.files):
                restore_files(self.partial, self.files, self.out)
        except OSError as error:
            log.warning("the files of %s are kept in %s: %s", self.out, self.files, error)
            return
        try:
            _delete_or_keep(self.discarded, self.out)
            if _is_folder(self.replaced) and not rename_if_free(self.replaced, self.out):
                # A bundle that is partly deleted must not be moved back later.
                os.rename(self.replaced, self.discarded)
                _delete_or_keep(self.discarded, self.out)
        except OSError as error:
            log.warning("hidden folders beside %s could not be deleted: %s", self.out, error)
        if _is_folder(self.partial):
            shutil.rmtree(self.partial, ignore_errors=True)


@contextmanager
def staging(out: Path) -> Iterator[Staging]:
    """Hold the lock of an output, delete what killed writers left, and clean up at the end.

    Args:
        out: path with links resolved; its parent must exist.

    Raises:
        BundleError: another process is writing to the output.
        OSError: the parent folder is not writable.
    """
    with locked(lock_path(out)) as lock:
        if lock is None:
            raise being_written(out)
        if lock.is_exclusive:
            _clear_all(out)
        folders = Staging(out, secrets.token_hex(TOKEN_BYTES))
        try:
            yield folders
        finally:
            repeat_if_interrupted(folders.clear)


@contextmanager
def staged_beside(out: Path) -> Iterator[Staging]:
    """Stage files that are written to the folder of `out`; `partial` is there.

    Raises:
        BundleError: another process is writing to the output.
        WhisperportError: the folder cannot be written to, or `out` is a folder.
    """
    with ExitStack() as stack:
        try:
            if out.is_dir():
                raise IsADirectoryError("it is a folder")
            staged = stack.enter_context(staging(out))
            os.mkdir(staged.partial)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise WhisperportError(
                f"cannot write {out}",
                why=getattr(error, "strerror", None) or str(error),
                hint="choose a file in a folder that you have permission to write to",
            ) from error
        try:
            yield staged
        except (OSError, WhisperportError) as error:
            cause = system_cause(error, staged.token)
            if not isinstance(cause, OSError):
                raise
            raise WhisperportError(
                f"cannot write {out}",
                why=cause.strerror or str(cause),
                hint="free some space, or choose another folder; nothing was left half-written",
            ) from error


def system_cause(error: Exception, token: str) -> Exception:
    """Return the system's error where a file in a hidden folder could not be written, or the error itself.

    The user knows the output, and not what is in the folder.

    Args:
        error: of a block that writes to hidden folders.
        token: of their names.
    """
    is_hidden = isinstance(error, WhisperportError) and token in error.what
    cause = error.__cause__
    return cause if is_hidden and isinstance(cause, OSError) else error


def clear_leftovers(out: Path) -> None:
    """Delete what killed writers left beside an output, unless another process is writing it now.

    Args:
        out: the output's path; with links resolved if its writer resolves them.

    Raises:
        OSError: the parent folder cannot be read or is not writable.
    """
    if not out.parent.is_dir() or is_locked(lock_path(out)) or not _leftovers(out):
        return
    with locked(lock_path(out)) as lock:
        if lock and lock.is_exclusive:
            _clear_all(out)


def being_written(out: Path) -> BundleError:
    """Make the error for an output whose lock another process holds."""
    return BundleError(
        f"another process is writing {out}",
        why=f"it holds the lock {lock_path(out)}",
        hint="wait until it ends, or choose another output",
    )


def keep_visible(folder: Path, out: Path, kind: str) -> Path:
    """Move a hidden folder to `NAME.kind`; if that exists, to `NAME.kind-2` and so on."""
    number = 1
    while True:
        kept = out.with_name(f"{out.name}.{kind}" + (f"-{number}" if number > 1 else ""))
        if rename_if_free(folder, kept):
            return kept
        number += 1


def _clear_all(out: Path) -> None:
    for leftover in _leftovers(out):
        existed = out.exists()
        leftover.clear()
        log.warning("deleted temporary folders that an interrupted writer of %s left behind", out)
        if not existed and out.exists():
            log.warning("moved %s back, which the interrupted writer had renamed", out)


def _leftovers(out: Path) -> list[Staging]:
    name = re.compile(
        rf"\.{re.escape(out.name)}\.({'|'.join(KINDS)})-([0-9a-f]{{{2 * TOKEN_BYTES}}})"
    )
    matches = [match for path in out.parent.iterdir() if (match := name.fullmatch(path.name))]
    stagings = [Staging(out, token) for token in sorted({match[2] for match in matches})]
    return [candidate for candidate in stagings if candidate.exists()]


def _delete_or_keep(folder: Path, out: Path) -> None:
    if not _is_folder(folder):
        return
    try:
        delete_listed(folder, out)
    except (BundleError, OSError) as error:
        kept = keep_visible(folder, out, "replaced")
        why = error.what if isinstance(error, BundleError) else error
        log.warning("the previous folder %s is kept in %s: %s", out, kept, why)


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder and not a link to one; whisperport makes no such links."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False
