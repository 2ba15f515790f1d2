"""Write a bundle all at once or not at all.

    out's parent/
    ├── .NAME.partial-PID-RANDOM   everything is written, hashed and flushed here
    ├── .NAME.replaced-PID-RANDOM  the bundle that was there, while the two change places
    └── NAME

Any exception, Ctrl-C included, removes the partial folder and leaves NAME as it was. Only SIGKILL
or a power cut can leave one of the hidden folders; the next writer of the same name clears it away,
and puts the old bundle back if the cut fell between the two renames.
"""

import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from whisperport.bundle import strict_json
from whisperport.bundle.folder import Bundle, check_complete, file_sha256, read_manifest_bytes
from whisperport.bundle.manifest import FORMAT, MANIFEST, FileEntry, Manifest, safe_path
from whisperport.bundle.strict_json import Field
from whisperport.errors import BundleError

log = logging.getLogger(__name__)

FULL = {errno.ENOSPC, errno.EDQUOT}
NEARLY_FULL_BYTES = (
    2**20
)  # numpy reports a short write without saying why; this little left says it


@dataclass(slots=True)
class BundleWriter:
    """A bundle being written: put files into `folder`, then call `commit` last."""

    out: Path
    folder: Path
    committed: bool = field(default=False, init=False)

    def preview(self, manifest: Manifest) -> Bundle:
        """What is in the folder so far, as a bundle: to be verified before it is committed.

        Raises:
            BundleError: a file has a name or kind that could not be read back.
        """
        return Bundle(self.folder, replace(manifest, files=_entries(self.folder)))

    def commit(self, manifest: Manifest) -> Bundle:
        """Hash all files, write the manifest, flush to disk, and put the folder in its place.

        Args:
            manifest: its `files` are ignored, and set from the folder.

        Raises:
            BundleError: a file the manifest needs is missing, or has a name or kind that could
                not be read back; or the disk is full.
        """
        manifest = replace(manifest, files=_entries(self.folder))
        raw = manifest.to_bytes()
        manifest = Manifest.from_bytes(raw)  # what cannot be read back is not written
        check_complete(manifest)
        (self.folder / MANIFEST).write_bytes(raw)
        _flush(self.folder)
        _swap(self.folder, self.out)
        self.committed = True
        return Bundle(self.out, manifest)


@contextmanager
def writing_bundle(out: Path, *, overwrite: bool = True) -> Iterator[BundleWriter]:
    """A folder to write a bundle into, which becomes `out` on `commit`, whole or not at all.

    Args:
        out: the bundle's folder; missing parents are made. A bundle already there stays as it is
            until the new one is complete.
        overwrite: False refuses to replace a bundle.

    Raises:
        BundleError: as `check_writable`, or the disk ran full. The partial folder is removed.
        RuntimeError: the block ended without `commit`.
    """
    out = check_writable(out, overwrite=overwrite)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(out)
    except OSError as error:
        raise _cannot_write(out, error) from error
    writer = BundleWriter(out, _hidden_sibling(out, "partial"))
    try:
        os.mkdir(writer.folder)  # not mkdtemp, whose folders nobody else may read
        yield writer
        if not writer.committed:
            raise RuntimeError("the block that writes a bundle ended without `commit`")
    except OSError as error:
        if not _is_full(error, out.parent):
            raise
        written = sum(entry.stat().st_size for entry in writer.folder.rglob("*"))
        raise BundleError(
            f"the disk is full: the bundle {out} was not written",
            why=f"{error}; {written / 1e6:.0f} MB were written, and more were needed",
            hint="free some space or choose a folder on another disk",
        ) from error
    finally:
        _remove(writer.folder)


def check_writable(out: Path, *, overwrite: bool = True, needed_bytes: int = 0) -> Path:
    """Would a bundle fit at `out`? Cheap, and leaves nothing behind: ask before hours of work.

    Returns:
        `out` with links resolved.

    Raises:
        BundleError: `out` is a file or a mounted disk; is a folder of something else, or a bundle
            holding files that are not its own; its parent cannot be written to; or the disk has
            fewer than `needed_bytes` left.
    """
    try:
        out = Path(os.path.realpath(out))
        _check_existing(out, overwrite)
        ancestor = out.parent
        while not os.path.lexists(ancestor):
            ancestor = ancestor.parent
        probe = ancestor / _hidden_sibling(out, "partial").name
        try:
            os.mkdir(probe)  # trying is the only test that is true for root and read-only disks too
        finally:
            _remove(probe)
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


def _check_existing(out: Path, overwrite: bool) -> None:
    if os.path.ismount(out):
        raise BundleError(
            f"cannot write a bundle to {out}",
            why="it is the root of a disk, which cannot change places with a new folder",
            hint=f"choose a folder inside it, such as {out / 'bundle'}",
        )
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise BundleError(
            f"cannot write a bundle to {out}", why="it is a file", hint="choose a folder"
        )
    if not os.listdir(out):
        return
    if not overwrite:
        raise BundleError(
            f"{out} exists, and overwriting was not asked for", hint="choose another folder"
        )
    try:
        listed = _listed_files(out)
    except BundleError as error:
        raise BundleError(
            f"{out} is not a bundle, and is not empty: it is not replaced",
            why=error.why or error.what,
            hint="choose another folder, or empty this one yourself",
        ) from error
    for file in sorted(out.rglob("*")):
        relative = file.relative_to(out).as_posix()
        hidden = any(part.startswith(".") for part in relative.split("/"))
        if not file.is_dir() and not hidden and relative not in listed:
            raise BundleError(
                f"{out} holds a file that is not the bundle's, and would be lost: {relative}",
                hint="move it away, or choose another folder",
            )


def _listed_files(folder: Path) -> set[str]:
    """Of a bundle of any version, damaged or not, as long as its manifest is one of ours."""
    members = strict_json.parse(read_manifest_bytes(folder), MANIFEST).mapping()
    if "format" not in members or members["format"].value != FORMAT or "files" not in members:
        raise BundleError(f"its {MANIFEST} is not a bundle's")
    return {MANIFEST, *members["files"].mapping()}


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


def _flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _flush_one(path)


def _flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(new: Path, out: Path) -> None:
    """Put `new` at `out`. Decides by what is on disk, so an interrupt may fall anywhere."""
    aside = _hidden_sibling(out, "replaced")
    try:
        if out.exists():
            os.rename(out, aside)
        os.rename(new, out)
        _flush_one(out.parent)
    finally:
        _finish(lambda: _settle(aside, out))


def _settle(aside: Path, out: Path) -> None:
    if aside.exists() and not out.exists():
        os.rename(aside, out)
    shutil.rmtree(aside, ignore_errors=True)


def _clear_leftovers(out: Path) -> None:
    """What a writer of `out` that was killed has left beside it."""
    pattern = re.compile(rf"\.{re.escape(out.name)}\.(partial|replaced)-(\d+)-[0-9a-f]{{8}}")
    for sibling in sorted(out.parent.iterdir()):
        match = pattern.fullmatch(sibling.name)
        if not match or sibling.is_symlink() or _is_running(int(match[2])):
            continue
        if match[1] == "replaced" and not out.exists() and _is_whole(sibling):
            os.rename(sibling, out)
            log.warning("put back %s, which an interrupted writer had moved aside", out)
        else:
            _remove(sibling)
            log.warning("removed %s, which an interrupted writer had left", sibling)


def _is_whole(folder: Path) -> bool:
    try:
        Bundle.open(folder, check_hashes=False)
    except BundleError:
        return False
    return True


def _is_running(pid: int) -> bool:
    if os.name == "nt":
        return True  # there, os.kill does not ask: it kills
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _hidden_sibling(out: Path, kind: str) -> Path:
    return out.with_name(f".{out.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}")


def _remove(folder: Path) -> None:
    _finish(lambda: shutil.rmtree(folder, ignore_errors=True))


def _finish(tidy: Callable[[], None]) -> None:
    """Tidy up, and again from the start if Ctrl-C falls just there, before passing it on."""
    try:
        tidy()
    except BaseException:
        tidy()
        raise


def _is_full(error: OSError, folder: Path) -> bool:
    return error.errno in FULL or shutil.disk_usage(folder).free < NEARLY_FULL_BYTES


def _cannot_write(out: Path, error: Exception) -> BundleError:
    return BundleError(
        f"cannot write a bundle to {out}", why=str(error), hint="choose a folder you may write to"
    )
