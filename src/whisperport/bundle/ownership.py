"""Which files of a folder whisperport wrote, and how they are deleted without touching any other.

A folder that lay at an output may hold work of the user's, hidden or not. It is never deleted as a
whole: only the files that its manifest lists are, and the folders that these leave empty.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from whisperport.bundle import strict_json
from whisperport.bundle.folder import read_manifest_bytes
from whisperport.bundle.manifest import FORMAT, MANIFEST
from whisperport.errors import BundleError


def check_replaceable(folder: Path, name: Path | None = None) -> None:
    """Check that a folder is empty, or a bundle that holds nothing but its own files.

    The bundle may be damaged, or of another version.

    Args:
        name: how errors call the folder, if it was moved away from there.

    Raises:
        BundleError: it is something else, or holds something that whisperport did not write: an
            unlisted file or folder, hidden or not, or a link; the message names it.
        OSError: the folder cannot be read.
    """
    _own_entries(folder, name or folder)


def delete_listed(folder: Path, name: Path | None = None) -> None:
    """Delete a folder that `check_replaceable` accepts, file by file.

    The manifest goes last, so that a later call can go on after an interrupt.

    Raises:
        BundleError: see `check_replaceable`; nothing was deleted.
        OSError: something else has appeared in the folder meanwhile, or may not be deleted. What
            was not deleted stays.
    """
    found = _own_entries(folder, name or folder)
    for relative in sorted(found, key=lambda path: path.count("/"), reverse=True):
        if (folder / relative).is_dir():
            os.rmdir(folder / relative)
        elif relative != MANIFEST:
            os.unlink(folder / relative)
    if MANIFEST in found:
        os.unlink(folder / MANIFEST)
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
            f"{name} is not a bundle and is not empty, so it is not replaced",
            why=error.why or error.what,
            hint="choose another folder, or empty this one yourself",
        ) from error
    folders = {str(parent) for file in files for parent in PurePosixPath(file).parents}
    found = []
    for relative, mode in _entries(folder):
        if not (stat.S_ISREG(mode) and relative in files) and not (
            stat.S_ISDIR(mode) and relative in folders
        ):
            raise BundleError(
                f"{name} holds something that whisperport did not write: {relative}",
                why="it would be lost if the bundle were replaced",
                hint="move it away, or choose another folder",
            )
        found.append(relative)
    return found


def _entries(folder: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Everything in a folder, with its mode; links are not followed."""
    with os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    for entry in entries:
        relative = prefix + entry.name
        mode = entry.stat(follow_symlinks=False).st_mode
        yield relative, mode
        if stat.S_ISDIR(mode):
            yield from _entries(Path(entry.path), f"{relative}/")


def _listed_files(folder: Path) -> frozenset[str]:
    """What the manifest lists, of any version, damaged or hostile: names to compare, not to open."""
    members = strict_json.parse(read_manifest_bytes(folder), MANIFEST).mapping()
    if "format" not in members or members["format"].value != FORMAT or "files" not in members:
        raise BundleError(f"its {MANIFEST} is not a bundle's")
    return frozenset({MANIFEST, *members["files"].mapping()})
