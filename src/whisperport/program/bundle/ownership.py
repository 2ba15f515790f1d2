"""Find and delete the files that whisperport wrote into a folder, without deleting any other file.

A folder at an output path may contain files of the user. Only the files that its manifest lists are
deleted, and the folders that are empty afterwards. A folder that was written for another app has a record
in place of a manifest.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from whisperport.errors import BundleError
from whisperport.program import strict_json
from whisperport.program.bundle.folder import read_manifest_bytes
from whisperport.program.bundle.manifest import FORMAT, MANIFEST

RECORD, RECORD_FORMAT = "whisperport.json", "whisperport layout"
LISTS = {
    MANIFEST: FORMAT,
    RECORD: RECORD_FORMAT,
}  # file that lists the others -> its field `format`


def check_replaceable(folder: Path, name: Path | None = None) -> None:
    """Check that a folder may be replaced: it is empty, or a bundle without other files in it.

    The bundle may be damaged, or of another format version.

    Args:
        name: path of the folder in errors; needed if the folder was moved.

    Raises:
        BundleError: the folder is not a bundle, or contains something that whisperport did not write: an
            unlisted file or folder, hidden or not, or a link. The message names it.
        OSError: the folder cannot be read.
    """
    _own_entries(folder, name or folder)


def delete_listed(folder: Path, name: Path | None = None) -> None:
    """Delete a folder that `check_replaceable` accepts, file by file.

    Manifest and record are deleted last, so that a later call can continue after an interrupt.

    Raises:
        BundleError: see `check_replaceable`; nothing was deleted.
        OSError: another file has appeared in the folder, or a file cannot be deleted. The remaining files
            are not deleted.
    """
    entries = _own_entries(folder, name or folder)
    for relative in sorted(entries, key=lambda path: path.count("/"), reverse=True):
        if (folder / relative).is_dir():
            os.rmdir(folder / relative)
        elif relative not in LISTS:
            os.unlink(folder / relative)
    for relative in LISTS:
        if relative in entries:
            os.unlink(folder / relative)
    os.rmdir(folder)


def _own_entries(folder: Path, name: Path) -> list[str]:
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise BundleError(f"{name} is a file or a link", hint="choose another folder")
    if not os.listdir(folder):
        return []
    try:
        files = _listed_files(folder)
    except BundleError as error:
        raise BundleError(
            f"{name} is not a bundle and is not empty, so whisperport does not replace it",
            why=error.why or error.what,
            hint="choose another folder, or delete the files in this one",
        ) from error
    folders = {str(parent) for file in files for parent in PurePosixPath(file).parents}
    entries = []
    for relative, mode in _entries(folder):
        if not (stat.S_ISREG(mode) and relative in files) and not (
            stat.S_ISDIR(mode) and relative in folders
        ):
            raise BundleError(
                f"{name} contains something that whisperport did not write: {relative}",
                why="replacing the bundle would delete it",
                hint="move it to another folder, or choose another output folder",
            )
        entries.append(relative)
    return entries


def _entries(folder: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the relative path and mode of everything in a folder. Links are not followed."""
    with os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    for entry in entries:
        relative = prefix + entry.name
        mode = entry.stat(follow_symlinks=False).st_mode
        yield relative, mode
        if stat.S_ISDIR(mode):
            yield from _entries(Path(entry.path), f"{relative}/")


def _listed_files(folder: Path) -> frozenset[str]:
    """Return the names that the manifest or the record lists. They are not checked: do not open them."""
    name = RECORD if (folder / RECORD).is_file() else MANIFEST
    members = strict_json.parse(read_manifest_bytes(folder, name), name).mapping()
    if "format" not in members or members["format"].value != LISTS[name] or "files" not in members:
        raise BundleError(f"its {name} was not written by whisperport")
    return frozenset({name, *members["files"].mapping()})
