"""Record which bundles this user exported and which ones passed a trial run.

    $XDG_STATE_HOME/whisperport/bundles     default: ~/.local/state/whisperport/bundles
    ├── own-SHA256      `export` wrote the bundle whose manifest has this checksum
    └── tried-SHA256    a trial run with this key passed

The records are empty files. The checksum of a manifest covers the hash of every file, so a record is
valid for exactly one bundle. The folder is ignored if it belongs to another user or if other users may
write to it. If nothing can be recorded, the trial run is repeated each time.
"""

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

from whisperport.program.bundle.folder import Bundle
from whisperport.program.bundle.manifest import Manifest

MAX_RECORDS = 2000  # the oldest records are deleted if there are more

Kind = Literal["own", "tried"]


def is_trusted(bundle: Bundle) -> bool:
    """Whether a bundle was exported by this user on this machine."""
    return bundle.hashed and is_recorded("own", bundle.manifest.checksum())


def record_own(manifest: Manifest) -> None:
    """Record that this user exported the bundle of `manifest`."""
    record("own", manifest.checksum())


def is_recorded(kind: Kind, sha256: str) -> bool:
    """Whether there is a record of this kind for a SHA-256 in hexadecimal."""
    folder = _state_folder()
    if folder is None or not _is_private(folder):
        return False
    try:
        return stat.S_ISREG(os.lstat(folder / f"{kind}-{sha256}").st_mode)
    except OSError:
        return False


def record(kind: Kind, sha256: str) -> None:
    """Write a record; do nothing if the state folder is not writable or belongs to another user."""
    folder = _state_folder()
    if folder is None:
        return
    with suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if _is_private(folder):
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
            os.close(os.open(folder / f"{kind}-{sha256}", flags, 0o600))
            _drop_oldest(folder)


def _state_folder() -> Path | None:
    base = os.environ.get("XDG_STATE_HOME") or {
        "win32": os.environ.get("LOCALAPPDATA", ""),
        "darwin": "~/Library/Application Support",
    }.get(sys.platform, "~/.local/state")
    folder = Path(os.path.expanduser(base))
    return folder / "whisperport" / "bundles" if folder.is_absolute() else None


def _is_private(folder: Path) -> bool:
    """Whether a folder belongs to this user and no other user may write to it."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    if not stat.S_ISDIR(status.st_mode):
        return False
    if os.name != "posix":  # on Windows, the folders of an account are private by default
        return True
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _drop_oldest(folder: Path) -> None:
    records = list(os.scandir(folder))
    if len(records) <= MAX_RECORDS:
        return
    records.sort(key=lambda entry: entry.stat(follow_symlinks=False).st_mtime_ns)
    for entry in records[:-MAX_RECORDS]:
        os.unlink(entry.path)
