"""Write a bundle completely or not at all.

A bundle is written into a hidden folder beside the output, hashed, flushed to the disk, and then moved to
the output. After an exception before that, Ctrl-C included, the output has not changed and the hidden
folder is deleted. `staging` describes what a killed process leaves behind and how it is deleted.

`rewrite_manifest` replaces the manifest of a bundle on disk; no other file changes.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from whisperport.errors import BundleError, WhisperportError
from whisperport.program.bundle.folder import Bundle, check_complete, file_sha256
from whisperport.program.bundle.manifest import MANIFEST, FileEntry, Manifest
from whisperport.program.bundle.ownership import check_replaceable
from whisperport.program.bundle.replacing import put_in_place
from whisperport.program.bundle.staging import (
    TOKEN_BYTES,
    Staging,
    being_written,
    staging,
    system_cause,
)
from whisperport.program.strict_json import Field, safe_path
from whisperport.system.atomic import (
    flush_folder,
    flush_rename,
    repeat_if_interrupted,
    write_atomic,
)
from whisperport.system.locking import is_locked, lock_path
from whisperport.system.system_error import (
    FULL,
    NEARLY_FULL_BYTES,
    is_of_stream,
    lack_of_space,
    unopenable,
)


@dataclass(slots=True)
class BundleWriter:
    """A bundle that is being written: write its files into `folder`, then call `commit`."""

    staging: Staging
    committed: bool = field(default=False, init=False)

    @property
    def out(self) -> Path:
        """The output: path of the bundle after `commit`."""
        return self.staging.out

    @property
    def folder(self) -> Path:
        """The hidden folder into which the bundle's files are written."""
        return self.staging.partial

    def preview(self, manifest: Manifest) -> Bundle:
        """Return the files in the folder as a bundle, so that they can be verified before `commit`.

        Raises:
            BundleError: a file has a name that a manifest cannot list, or is not a regular file.
        """
        return Bundle(self.folder, replace(manifest, files=_entries(self.folder)))

    def commit(self, manifest: Manifest) -> Bundle:
        """Hash all files, write the manifest, flush to disk, and move the folder to the output.

        Args:
            manifest: its `files` are replaced by the files in the folder.

        Raises:
            BundleError: a file that the manifest needs is missing; a file has a name that a manifest
                cannot list, or is not a regular file; the disk is full; or something that whisperport
                did not write has appeared at the output. In the last case the new bundle is kept beside
                the output.
        """
        _remove_empty_folders(self.folder)
        manifest = replace(manifest, files=_entries(self.folder))
        raw = manifest.to_bytes()
        manifest = Manifest.from_bytes(raw)  # checks that the manifest can be read again
        check_complete(manifest)
        (self.folder / MANIFEST).write_bytes(raw)
        flush_files(self.folder)
        put_in_place(self.staging)
        self.committed = True
        return Bundle(self.out, manifest)


@contextmanager
def writing_bundle(out: Path, *, overwrite: bool = True) -> Iterator[BundleWriter]:
    """Write a bundle in a `with` block; `commit` moves it to `out`, completely or not at all.

    Args:
        out: folder of the bundle; missing parents are created. An older bundle there does not change
            until the new one is complete.
        overwrite: False: a bundle at `out` is an error.

    Raises:
        BundleError: see `check_writable`; or the disk is full. The hidden folder is deleted.
        RuntimeError: the block ended without `commit`.
    """
    out = check_writable(out, overwrite=overwrite)
    with ExitStack() as stack:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            writer = BundleWriter(stack.enter_context(staging(out)))
            _check_existing(out, overwrite)  # again, now that this process holds the lock
            os.mkdir(writer.folder)  # not mkdtemp, whose folders other users cannot read
        except OSError as error:
            raise _cannot_write(out, error) from error
        with naming_full_disk(out, writer.folder):
            yield writer
        if not writer.committed:
            raise RuntimeError("the block that writes a bundle ended without `commit`")


def check_writable(out: Path, *, overwrite: bool = True, needed_bytes: int = 0) -> Path:
    """Check that a bundle can be written to `out`, before hours of work. Changes nothing on the disk.

    Returns:
        `out` with links resolved.

    Raises:
        BundleError: `out` is a file, the root of a mounted disk, the current folder or a parent of it,
            a link to a folder that is not empty, a folder that is not a bundle, or a bundle that contains
            other files; another process is
            writing it; its parent folder is not writable; or fewer than `needed_bytes` are free.
    """
    unresolved = Path(out)
    try:
        out = Path(os.path.realpath(out))  # an OSError here: the working directory was deleted
    except ValueError as error:  # a NUL in the path
        raise _cannot_write(out, error) from error
    if reason := unopenable(out):
        raise BundleError(f"cannot write a bundle to {out}", **reason)
    try:
        if unresolved.is_symlink() and out.is_dir() and os.listdir(out):
            raise BundleError(
                f"cannot write a bundle to {unresolved}",
                why=f"it is a link to {out}, which is not empty",
                hint="to replace the bundle there, give the path of that folder; or delete the link",
            )
        _check_existing(out, overwrite)
        ancestor = out.parent
        while not os.path.lexists(ancestor):
            ancestor = ancestor.parent
        if ancestor == out.parent and is_locked(lock_path(out)):
            raise being_written(out)
        # This is the longest name that writing the bundle needs.
        _try_to_write(ancestor / Staging(out, secrets.token_hex(TOKEN_BYTES)).discarded.name)
        lack = lack_of_space(ancestor, needed_bytes)
    except OSError as error:
        raise _cannot_write(out, error) from error
    if lack:
        raise BundleError(
            f"not enough free disk space for {out}",
            why=lack,
            hint="free some space or choose a folder on another disk",
        )
    return out


def _try_to_write(probe: Path) -> None:
    """Create and delete a folder. Permission bits alone do not show read-only disks or root's rights."""
    try:
        os.mkdir(probe)
    finally:
        repeat_if_interrupted(lambda: shutil.rmtree(probe, ignore_errors=True))


def _check_existing(out: Path, overwrite: bool) -> None:
    if os.path.ismount(out):
        raise BundleError(
            f"cannot write a bundle to {out}",
            why="it is the root of a mounted disk, which cannot be replaced",
            hint=f"choose a folder inside it, such as {out / 'bundle'}",
        )
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise BundleError(
            f"cannot write a bundle to {out}",
            why="it is a file, and a bundle is a folder",
            hint="choose another path",
        )
    if _holds_current_folder(out):
        raise BundleError(
            f"cannot write a bundle to {out}",
            why="it is the current folder or a parent of it, and writing the bundle would replace it",
            hint=f"choose a folder inside it, such as {out / 'bundle'}, or run the command in another "
            "folder",
        )
    if not overwrite and os.listdir(out):
        raise BundleError(
            f"{out} exists already",
            why="replacing an existing bundle is not allowed here",
            hint="choose another folder",
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
            raise BundleError(f"a bundle cannot contain {relative}", why="it is not a regular file")
        if file.is_file():
            safe_path(Field(relative, "files", MANIFEST))
            entries[relative] = FileEntry(file_sha256(file), file.stat().st_size)
    return entries


def _remove_empty_folders(folder: Path) -> None:
    """Remove empty folders: a manifest lists only files, so they would be taken for folders of the user."""
    for parent, folders, _ in os.walk(folder, topdown=False):
        for name in folders:
            with suppress(OSError):  # it is not empty
                os.rmdir(os.path.join(parent, name))


def flush_files(folder: Path) -> None:
    """Write all files of a folder through to the disk."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            flush_folder(path)
        else:
            with path.open("r+b") as file:
                os.fsync(file.fileno())


@contextmanager
def naming_full_disk(out: Path, draft: Path) -> Iterator[None]:
    """Say that the disk is full, if it is, where a block that writes a folder fails.

    Args:
        out: the folder that is to be written.
        draft: where it is written first.

    Raises:
        BundleError: the disk is full, or a library could not write a file. Any other error of the block
            is raised as it is.
    """
    try:
        yield
    # A library that writes a file raises RuntimeError.
    except (OSError, RuntimeError, WhisperportError) as error:
        cause = system_cause(error, draft.name)
        if isinstance(cause, WhisperportError):
            raise
        free = shutil.disk_usage(out.parent).free
        is_full = getattr(cause, "errno", None) in FULL or free < NEARLY_FULL_BYTES
        if not is_full and not is_of_stream(str(cause)):
            raise
        written = sum(entry.stat().st_size for entry in draft.rglob("*"))
        what, rest = f"the disk is full, so {out} was not written", "more are needed"
        if not is_full:  # a library may have deleted the file that it could not write
            what, rest = f"{out} was not written", f"{free / 1e6:.0f} MB are free"
        raise BundleError(
            what,
            why=f"{cause}; {written / 1e6:.0f} MB were written, and {rest}",
            hint="free some space or choose a folder on another disk",
        ) from error


def _cannot_write(out: Path, error: Exception) -> BundleError:
    return BundleError(
        f"cannot write a bundle to {out}",
        why=str(error),
        hint="choose a folder that you have permission to write to",
    )


def rewrite_manifest(bundle: Bundle, manifest: Manifest) -> Bundle:
    """Replace the bundle's manifest, completely or not at all. Holds the lock of the bundle meanwhile.

    Args:
        manifest: the new manifest, which must list the same files as the old one.

    Raises:
        BundleError: another process writes the bundle or has replaced it, or the folder is not writable.
    """
    if manifest.files != bundle.manifest.files:
        raise ValueError("the new manifest does not list the same files as the old one")
    raw = manifest.to_bytes()
    manifest = Manifest.from_bytes(raw)  # checks that the manifest can be read again
    check_complete(manifest)
    out = Path(os.path.realpath(bundle.folder))
    check_rewritable(bundle)
    try:
        with staging(out) as folders:
            bundle.check_unchanged()  # no other process replaces it while the lock is held
            os.mkdir(folders.partial)  # outside of the bundle, so that a kill leaves no file in it
            write_atomic(folders.partial / MANIFEST, raw)
            os.replace(folders.partial / MANIFEST, out / MANIFEST)
            flush_rename(out / MANIFEST)
    except OSError as error:
        raise _cannot_rewrite(bundle, str(error)) from error
    return replace(bundle, manifest=manifest, raw=raw)


def check_rewritable(bundle: Bundle) -> None:
    """Check that `rewrite_manifest` may write, before minutes of work. Changes nothing on the disk.

    Raises:
        BundleError: the bundle's folder, or the one that it is in, is not writable.
    """
    folder = Path(os.path.realpath(bundle.folder))
    for needed in (folder, folder.parent):
        if not os.access(needed, os.W_OK):
            raise _cannot_rewrite(bundle, f"{needed} is not writable")


def _cannot_rewrite(bundle: Bundle, why: str) -> BundleError:
    return BundleError(
        f"cannot write the manifest of {bundle.folder}",
        why=why,
        hint="copy the bundle to a folder that you have permission to write to",
    )
