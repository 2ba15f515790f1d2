"""Folders beside an output, in which it is prepared and from which it is put in place.

    out's parent/
    ├── .NAME.whisperport-lock   held while NAME is written
    ├── .NAME.partial-TOKEN      everything is written here
    ├── .NAME.discarded-TOKEN    changes places with NAME in one step; then it is the old bundle
    ├── .NAME.replaced-TOKEN     the old bundle, where the system cannot do that in one step
    └── NAME

At the end of the `with` statement none of the hidden ones is left, whatever happened in it. SIGKILL
and a power cut leave them; whoever takes the lock next knows that their writer is dead and clears
them away, or puts the old bundle back if NAME is missing.
"""

import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from whisperport.atomic import repeat_if_interrupted
from whisperport.bundle.ownership import delete_listed
from whisperport.bundle.renaming import rename_if_free
from whisperport.errors import BundleError
from whisperport.locking import is_locked, lock_path, locked

log = logging.getLogger(__name__)

KINDS = ("partial", "discarded", "replaced")
TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class Staging:
    """The hidden folders of one writer of `out`."""

    out: Path
    token: str

    @property
    def partial(self) -> Path:
        """Never lies at the output: whatever is in it may be deleted."""
        return self._beside("partial")

    @property
    def discarded(self) -> Path:
        """Deleted file by file, since the user may have put something into it."""
        return self._beside("discarded")

    @property
    def replaced(self) -> Path:
        """Moved back to the output as long as nothing is there."""
        return self._beside("replaced")

    def _beside(self, kind: str) -> Path:
        return self.out.with_name(f".{self.out.name}.{kind}-{self.token}")

    def exists(self) -> bool:
        return any(_is_folder(self._beside(kind)) for kind in KINDS)

    def clear(self) -> None:
        """Leave none of the folders, the output in its place, and nothing of the user's deleted.

        Decides by what is on the disk, so that it may be called at any time, and again.
        """
        try:
            _delete_or_keep(self.discarded, self.out)
            if _is_folder(self.replaced) and not rename_if_free(self.replaced, self.out):
                os.rename(self.replaced, self.discarded)  # not put back later, half deleted
                _delete_or_keep(self.discarded, self.out)
        except OSError as error:
            log.warning("folders beside %s could not be cleared: %s", self.out, error)
        if _is_folder(self.partial):
            shutil.rmtree(self.partial, ignore_errors=True)


@contextmanager
def staging(out: Path) -> Iterator[Staging]:
    """Take the lock of an output, clear what killed writers left, and tidy up at the end.

    Args:
        out: with links resolved; its parent exists.

    Raises:
        BundleError: another process is writing there.
        OSError: the folder cannot be written to.
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


def clear_leftovers(out: Path) -> None:
    """Clear what killed writers of an output left beside it, unless it is being written now.

    Args:
        out: with links resolved, if its writer resolves them.

    Raises:
        OSError: the folder cannot be read or written to.
    """
    if not out.parent.is_dir() or is_locked(lock_path(out)) or not _leftovers(out):
        return
    with locked(lock_path(out)) as lock:
        if lock and lock.is_exclusive:
            _clear_all(out)


def being_written(out: Path) -> BundleError:
    """The error for an output whose lock is held."""
    return BundleError(
        f"another process is writing {out}",
        why=f"it holds the lock {lock_path(out)}",
        hint="wait until it ends, or choose another output",
    )


def keep_visible(folder: Path, out: Path, kind: str) -> Path:
    """Move a hidden folder to `NAME.kind`, or `NAME.kind-2` and so on if that is taken."""
    number = 1
    while True:
        kept = out.with_name(f"{out.name}.{kind}" + (f"-{number}" if number > 1 else ""))
        if rename_if_free(folder, kept):
            return kept
        number += 1


def _clear_all(out: Path) -> None:
    for leftover in _leftovers(out):
        had = out.exists()
        leftover.clear()
        log.warning("cleared what an interrupted writer of %s had left beside it", out)
        if not had and out.exists():
            log.warning("put %s back, which it had moved away", out)


def _leftovers(out: Path) -> list[Staging]:
    name = re.compile(
        rf"\.{re.escape(out.name)}\.({'|'.join(KINDS)})-([0-9a-f]{{{2 * TOKEN_BYTES}}})"
    )
    matches = [match for path in out.parent.iterdir() if (match := name.fullmatch(path.name))]
    found = [Staging(out, token) for token in sorted({match[2] for match in matches})]
    return [one for one in found if one.exists()]


def _delete_or_keep(folder: Path, out: Path) -> None:
    if not _is_folder(folder):
        return
    try:
        delete_listed(folder, out)
    except (BundleError, OSError) as error:
        kept = keep_visible(folder, out, "replaced")
        why = error.what if isinstance(error, BundleError) else error
        log.warning("what lay at %s before is kept in %s: %s", out, kept, why)


def _is_folder(path: Path) -> bool:
    """A real one: a link of that name is not ours."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False
