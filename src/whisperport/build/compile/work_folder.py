"""The work folder of `compile`: one process at a time uses it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from whisperport.errors import BundleError, UsageError, WhisperportError
from whisperport.system.atomic import TEMPORARY, clear_temporaries, write_atomic
from whisperport.system.locking import lock_path, locked
from whisperport.system.outputs import is_inside, is_same

MARK = ".whisperport-work"
MARK_TEXT = (
    b"`whisperport compile` keeps its finished stages in this folder, and writes files here.\n"
)


@contextmanager
def work_folder(work: Path) -> Iterator[None]:
    """Make and lock the work folder: two compilations in one would mix their calibration sets and stages.

    Raises:
        BundleError: another process holds the lock, or the folder has files of somebody else.
        WhisperportError: the folder cannot be written to.
    """
    work = Path(os.path.realpath(work))
    with ExitStack() as stack:
        try:
            work.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(locked(lock_path(work)))
            if lock:
                _claim(work)
            if lock and lock.is_exclusive:
                for folder in (work, *work.glob("*/"), *work.glob("*/*/")):
                    clear_temporaries(folder)
        except OSError as error:
            raise WhisperportError(
                f"cannot write to the work folder {work}",
                why=str(error),
                hint="choose another folder with `--work`",
            ) from error
        if lock is None:
            raise BundleError(
                f"another process is compiling in the work folder {work}",
                why=f"that process holds the lock {lock_path(work)}",
                hint="wait until that process ends, or choose another folder with `--work`",
            )
        yield


def work_of(out: Path, work: Path | None) -> Path:
    """Return the work folder for an output: the one that was chosen, or else OUTPUT.compile beside it.

    Raises:
        UsageError: it is inside of the output.
    """
    named = out if out.name else out.resolve()  # `.` has no name
    work = work or named.with_name(f"{named.resolve().name}.compile")
    if is_same(work, out) or is_inside(work, out):
        raise UsageError(
            f"the work folder {work} cannot be inside {out}",
            why="the complete folder is written in one step",
            hint="omit `--work` to use a folder beside it",
        )
    return work


def _claim(work: Path) -> None:
    """Mark an empty folder as a work folder; leave a folder with files of somebody else as it is."""
    if (work / MARK).is_file():
        return
    # A process that was killed before the rename leaves the mark under another name.
    names = os.listdir(work)
    left = {name for name in filter(TEMPORARY.fullmatch, names) if name.startswith(f".{MARK}.")}
    if first := min({*names} - left, default=""):
        raise BundleError(
            f"{work} is not a work folder of whisperport",
            why=f"it is not empty: it contains `{first}`, and a stage could replace a file in it",
            hint="give `--work` a new folder, or delete this one if an older version made it",
        )
    write_atomic(work / MARK, MARK_TEXT)


def copy_in(source: Path, target: Path, copied: dict[Path, Path]) -> None:
    """Copy a file of the bundle into a program's folder.

    A file that several programs read, such as their weights, is stored once in the work folder, as hard
    links to the first copy. Where the file system has none, each program gets a copy.

    Args:
        source: the file.
        target: its path in the work folder.
        copied: file -> its first copy; extended.
    """
    target.unlink(missing_ok=True)
    first = copied.setdefault(source, target)
    if first != target:
        with suppress(OSError):
            os.link(first, target)
            return
    shutil.copyfile(source, target)
