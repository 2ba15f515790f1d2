"""Write a bundle completely or not at all.

It is written into a hidden folder beside the output, hashed, flushed to the disk, and only then put
in place. Any exception before that, Ctrl-C included, leaves the output as it was and nothing beside
it; `staging` says what a killed process leaves, and how the next one clears it.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from whisperport.atomic import flush_folder, repeat_if_interrupted
from whisperport.bundle.folder import Bundle, check_complete, file_sha256
from whisperport.bundle.manifest import MANIFEST, FileEntry, Manifest
from whisperport.bundle.ownership import check_replaceable
from whisperport.bundle.paths import safe_path
from whisperport.bundle.replacing import put_in_place
from whisperport.bundle.staging import TOKEN_BYTES, Staging, being_written, staging
from whisperport.bundle.strict_json import Field
from whisperport.errors import BundleError
from whisperport.locking import is_locked, lock_path

FULL = {errno.ENOSPC, errno.EDQUOT}
# numpy reports a short write without a reason; when so little is left, this is the reason.
NEARLY_FULL_BYTES = 2**20


@dataclass(slots=True)
class BundleWriter:
    """A bundle being written: put files into `folder`, then call `commit` last."""

    staging: Staging
    committed: bool = field(default=False, init=False)

    @property
    def out(self) -> Path:
        """Where the bundle will be."""
        return self.staging.out

    @property
    def folder(self) -> Path:
        """Where its files are written."""
        return self.staging.partial

    def preview(self, manifest: Manifest) -> Bundle:
        """What is in the folder so far, as a bundle: to be verified before it is committed.

        Raises:
            BundleError: a file has a name or kind that could not be read back.
        """
        return Bundle(self.folder, replace(manifest, files=_entries(self.folder)))

    def commit(self, manifest: Manifest) -> Bundle:
        """Hash all files, write the manifest, flush to disk, and put the folder at the output.

        Args:
            manifest: its `files` are ignored, and set from the folder.

        Raises:
            BundleError: a file the manifest needs is missing, or has a name or kind that could
                not be read back; the disk is full; or something that whisperport did not write
                has appeared at the output: then the new bundle is kept beside it.
        """
        _remove_empty_folders(self.folder)
        manifest = replace(manifest, files=_entries(self.folder))
        raw = manifest.to_bytes()
        manifest = Manifest.from_bytes(raw)  # what cannot be read back is not written
        check_complete(manifest)
        (self.folder / MANIFEST).write_bytes(raw)
        _flush(self.folder)
        put_in_place(self.staging)
        self.committed = True
        return Bundle(self.out, manifest)


@contextmanager
def writing_bundle(out: Path, *, overwrite: bool = True) -> Iterator[BundleWriter]:
    """A folder to write a bundle into, which becomes `out` on `commit`, completely or not at all.

    Args:
        out: the bundle's folder; missing parents are made. A bundle already there stays as it is
            until the new one is complete.
        overwrite: False forbids replacing a bundle.

    Raises:
        BundleError: as `check_writable`, or the disk is full. The partial folder is removed.
        RuntimeError: the block ended without `commit`.
    """
    out = check_writable(out, overwrite=overwrite)
    with ExitStack() as stack:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            writer = BundleWriter(stack.enter_context(staging(out)))
            _check_existing(out, overwrite)  # again, now that nobody else writes there
            os.mkdir(writer.folder)  # not mkdtemp, whose folders nobody else may read
        except OSError as error:
            raise _cannot_write(out, error) from error
        try:
            yield writer
        except OSError as error:
            if not _is_full(error, out.parent):
                raise
            raise _disk_full(writer, error) from error
        if not writer.committed:
            raise RuntimeError("the block that writes a bundle ended without `commit`")


def check_writable(out: Path, *, overwrite: bool = True, needed_bytes: int = 0) -> Path:
    """Check whether a bundle can be written to `out`, before hours of work. Leaves nothing behind.

    Returns:
        `out` with links resolved.

    Raises:
        BundleError: `out` is a file, a mounted disk, or the current folder or a parent of it; it is
            a folder of something else, or a bundle holding files that are not its own; another
            process is writing it; its parent cannot be written to; or the disk has fewer than
            `needed_bytes` left.
    """
    try:
        out = Path(os.path.realpath(out))
        _check_existing(out, overwrite)
        ancestor = out.parent
        while not os.path.lexists(ancestor):
            ancestor = ancestor.parent
        if ancestor == out.parent and is_locked(lock_path(out)):
            raise being_written(out)
        # The longest of the names that are needed.
        _try_to_write(ancestor / Staging(out, secrets.token_hex(TOKEN_BYTES)).discarded.name)
        free = shutil.disk_usage(ancestor).free
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise _cannot_write(out, error) from error
    if free < needed_bytes:
        raise BundleError(
            f"the disk is too full for a bundle at {out}",
            why=f"{needed_bytes / 1e6:.0f} MB are needed, and {free / 1e6:.0f} MB are free",
            hint="free some space or choose a folder on another disk",
        )
    return out


def _try_to_write(probe: Path) -> None:
    """Only trying tells the truth about read-only disks, and about folders of others for root."""
    try:
        os.mkdir(probe)
    finally:
        repeat_if_interrupted(lambda: shutil.rmtree(probe, ignore_errors=True))


def _check_existing(out: Path, overwrite: bool) -> None:
    if os.path.ismount(out):
        raise BundleError(
            f"cannot write a bundle to {out}",
            why="it is the root of a disk, which cannot be replaced by a new folder",
            hint=f"choose a folder inside it, such as {out / 'bundle'}",
        )
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise BundleError(
            f"cannot write a bundle to {out}", why="it is a file", hint="choose a folder"
        )
    if _holds_current_folder(out):
        raise BundleError(
            f"cannot write a bundle to {out}",
            why="it is the current folder or contains it, and a new folder would replace it",
            hint=f"choose a folder inside it, such as {out / 'bundle'}, or change to another "
            "folder first",
        )
    if not overwrite and os.listdir(out):
        raise BundleError(
            f"{out} exists, and overwriting was not asked for", hint="choose another folder"
        )
    check_replaceable(out)


def _holds_current_folder(out: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(out)
    except FileNotFoundError:  # the current folder was deleted
        return False


def _entries(folder: Path) -> dict[str, FileEntry]:
    entries = {}
    for file in sorted(folder.rglob("*")):
        relative = file.relative_to(folder).as_posix()
        if file.is_symlink() or not (file.is_file() or file.is_dir()):
            raise BundleError(f"a bundle cannot hold {relative}", why="it is not a regular file")
        if file.is_file():
            safe_path(Field(relative, "files", MANIFEST))
            entries[relative] = FileEntry(file_sha256(file), file.stat().st_size)
    return entries


def _remove_empty_folders(folder: Path) -> None:
    """The manifest lists files only, so an empty folder would look like one of the user's."""
    for parent, folders, _ in os.walk(folder, topdown=False):
        for name in folders:
            with suppress(OSError):  # it is not empty
                os.rmdir(os.path.join(parent, name))


def _flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            flush_folder(path)
        else:
            with path.open("r+b") as file:
                os.fsync(file.fileno())


def _is_full(error: OSError, folder: Path) -> bool:
    return error.errno in FULL or shutil.disk_usage(folder).free < NEARLY_FULL_BYTES


def _disk_full(writer: BundleWriter, error: OSError) -> BundleError:
    written = sum(entry.stat().st_size for entry in writer.folder.rglob("*"))
    return BundleError(
        f"the disk is full: the bundle {writer.out} was not written",
        why=f"{error}; {written / 1e6:.0f} MB were written, and more were needed",
        hint="free some space or choose a folder on another disk",
    )


def _cannot_write(out: Path, error: Exception) -> BundleError:
    return BundleError(
        f"cannot write a bundle to {out}", why=str(error), hint="choose a folder you may write to"
    )
