"""A folder that no reader may touch; inotify reports files that are opened, read, written or removed."""

import ctypes
import os
import shutil
import struct
from pathlib import Path

IN_ACCESS, IN_MODIFY, IN_OPEN, IN_CREATE, IN_DELETE = 0x1, 0x2, 0x20, 0x100, 0x200
IN_ISDIR = 0x40000000
NAMES = {
    IN_ACCESS: "read",
    IN_MODIFY: "written",
    IN_OPEN: "opened",
    IN_CREATE: "made",
    IN_DELETE: "removed",
}
EVENT = struct.Struct("iIII")


class Outside:
    """The folder with files that must not be touched, and the inotify watch for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._watch = -1

    def fill(self, copies: dict[str, bytes]) -> None:
        """Fill the folder with new files: valid copies, which a reader would accept."""
        if self._watch >= 0:
            os.close(self._watch)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for name, content in copies.items():
            (self.folder / name).write_bytes(content)

    def watch(self) -> None:
        """Start to watch the folder.

        Raises:
            OSError: the system has no more inotify instances.
        """
        self._watch = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        mask = IN_ACCESS | IN_MODIFY | IN_OPEN | IN_CREATE | IN_DELETE
        folders = [self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())]
        for folder in folders:
            if self._libc.inotify_add_watch(self._watch, os.fsencode(folder), mask) < 0:
                raise OSError(ctypes.get_errno(), "inotify_add_watch")

    def touched(self) -> list[str]:
        """Return the actions since `watch`, such as "canary.bin opened"; listing folders is ignored."""
        found: dict[str, None] = {}
        try:
            data = os.read(self._watch, 1 << 20)
        except BlockingIOError:
            return []
        while data:
            _, mask, _, length = EVENT.unpack_from(data)
            name = data[EVENT.size : EVENT.size + length].rstrip(b"\0").decode("utf-8", "replace")
            data = data[EVENT.size + length :]
            if not mask & IN_ISDIR or mask & (IN_CREATE | IN_DELETE):
                found |= {f"{name} {word}": None for bit, word in NAMES.items() if mask & bit}
        return list(found)
