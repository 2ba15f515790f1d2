"""The folder that an archive is written into: one of its own, in which nothing of the user's is replaced.

    OUT/archive.json           says that the folder is an archive; the bundle and the options of all rows
    OUT/parts/NAME.parquet     finished rows
    OUT/subtitles, report.html, summary.json

A file is written where there is none, or where an earlier run wrote it, which the file itself says. A link
is nothing that an earlier run wrote: it could lead out of the folder.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from whisperport.apps.archive.identity import Identity
from whisperport.errors import UsageError
from whisperport.system.atomic import TEMPORARY, write_atomic
from whisperport.system.locking import lock_path
from whisperport.system.page import is_page
from whisperport.system.regular_file import other_kind

RECORD, SUMMARY, REPORT = "archive.json", "summary.json", "report.html"
PARTS, SUBTITLES = "parts", "subtitles"
GENERATOR = "whisperport archive"  # a member of both .json files
FORMAT = 2  # of the folder and its rows
MAX_BYTES = 16 * 2**20  # of a .json file; a thousand causes of errors are less than 1 MB


def check_folder(folder: Path) -> None:
    """Check before any work that every file of an archive can be written without replacing another.

    Raises:
        UsageError: the path is not a folder, the folder has files and is no archive, or something that no
            earlier run wrote is in the way of a file of the archive.
        OSError: the folder cannot be read.
    """
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        _refuse(folder, folder, f"it is {other_kind(folder) or 'a file'}, and no folder")
    if not os.path.lexists(folder / RECORD):
        if foreign := next(_of_others(folder), None):
            _refuse(folder, foreign, f"the folder is no archive: it has no {RECORD}")
        return
    for name, (kind, is_own) in _ENTRIES.items():
        if not os.path.lexists(path := folder / name):
            continue
        present = "a link" if path.is_symlink() else other_kind(path) or "a file"
        if present != kind:
            _refuse(folder, path, f"it is {present}; expected {kind} that an earlier run wrote")
        if not is_own(path):
            _refuse(folder, path, "no earlier run wrote it")


def _of_others(folder: Path) -> Iterator[Path]:
    """Yield what is in a folder, but for what a run leaves that was killed at its very beginning."""
    lock = lock_path(folder / RECORD)
    for path in sorted(folder.iterdir()):
        if path != lock and not TEMPORARY.fullmatch(path.name):
            yield path


def _says_so(path: Path) -> bool:
    return json_object(path).get("generator") == GENERATOR


def _is_record(path: Path) -> bool:
    document = json_object(path)
    if document.keys() == {"bundle_sha256", "options_sha256"} or (
        document.get("generator") == GENERATOR and document.get("format") != FORMAT
    ):
        raise UsageError(
            f"`{path.parent}` is an archive of an earlier version, or a later one, of whisperport",
            why=f"its rows have other columns; the format of this version is {FORMAT}",
            hint="choose another folder with `--out`, or use the version that wrote it",
        )
    return document.get("generator") == GENERATOR


_ENTRIES: dict[str, tuple[str, Callable[[Path], bool]]] = {
    RECORD: ("a file", _is_record),
    SUMMARY: ("a file", _says_so),
    REPORT: ("a file", is_page),
    PARTS: ("a folder", lambda _: True),  # each part says in its schema that it is one
    SUBTITLES: ("a folder", lambda _: True),  # a file in it is never replaced
}


def record(folder: Path, identity: Identity) -> None:
    """Record the bundle and the options at the first run, and compare them at every other one.

    Raises:
        UsageError: they differ.
        WhisperportError: the record cannot be written.
    """
    path = folder / RECORD
    hashes = {
        "bundle_sha256": identity.bundle_sha256,
        "options_sha256": identity.options_sha256,
    }
    if not path.exists():
        document = {"generator": GENERATOR, "format": FORMAT, **hashes}
        write_atomic(path, f"{json.dumps(document, indent=1)}\n".encode())
        return
    stored = json_object(path)
    for name, value in hashes.items():
        if stored.get(name) != value:
            raise UsageError(
                f"`{folder}` has rows of {'another bundle' if 'bundle' in name else 'other options'}",
                why=f"{RECORD} states {name} {stored.get(name)!r:.20}; now it is {value!r:.20}",
                hint="choose another folder with `--out`, or repeat the command with the bundle and the "
                "options of the first run",
            )


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a file of JSON; empty if it has none, or is larger than `MAX_BYTES`."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        document = json.loads(text) if len(text) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        document = None
    return document if isinstance(document, dict) else {}


def _refuse(folder: Path, path: Path, why: str) -> NoReturn:
    raise UsageError(
        f"`{path}` is in the way of an archive in `{folder}`"
        if path != folder
        else f"an archive cannot be written into `{folder}`",
        why=why,
        hint="choose with `--out` a new or empty folder, or one of an earlier run; or move the file away",
    )
