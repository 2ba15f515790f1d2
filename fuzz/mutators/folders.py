"""Mutate a folder: links that lead out, pipes, folders in place of files, missing or exchanged files."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random

CHANGES: tuple[str, ...] = (
    "link",
    "link",
    "relative link",
    "loop",
    "pipe",
    "folder",
    "gone",
    "empty",
    "exchange",
)
CHANGES += ("device", "folder link", "hard to read", "extra")


LINKS = ("link", "relative link", "folder link", "extra")  # changes that lead out of the folder


def mutate(
    folder: Path, names: Sequence[str], random: Random, outside: str, without: Sequence[str] = ()
) -> None:
    """Replace or remove one file of `folder`; its contents do not change.

    Args:
        without: changes that are not made. A reader of checkpoints may follow links, since the Hugging
            Face hub stores a checkpoint as a folder of links.
    """
    path = folder / random.choice(names)
    other = folder / random.choice(names)
    change = random.choice([change for change in CHANGES if change not in without])
    if change == "exchange":
        content = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return
    if change == "extra":
        (path.parent / "extra").symlink_to(Path(outside, "canary.bin"))
        return
    if change == "folder link":
        _to_folder_outside(folder, path, outside)
        return
    content = path.read_bytes()
    path.unlink()
    if change == "link":
        path.symlink_to(Path(outside, random.choice(("canary.bin", "weights.bin", path.name))))
    elif change == "relative link":
        path.symlink_to(os.path.relpath(Path(outside, "canary.bin"), path.parent))
    elif change == "loop":
        path.symlink_to(path.name)
    elif change == "pipe":
        os.mkfifo(path)
    elif change == "folder":
        path.mkdir()
    elif change == "empty":
        path.touch()
    elif change == "device":
        path.symlink_to(random.choice(("/dev/zero", "/dev/full", "/dev/tty", "/proc/self/mem")))
    elif change == "hard to read":
        path.write_bytes(content)
        path.chmod(0)


def _to_folder_outside(folder: Path, path: Path, outside: str) -> None:
    """Replace the folder of a file by a link to a copy of the folder outside."""
    if path.parent == folder:
        path.unlink()
        path.symlink_to(Path(outside))
        return
    copy = Path(outside, path.parent.name)
    shutil.rmtree(copy, ignore_errors=True)
    shutil.move(path.parent, copy)
    path.parent.symlink_to(copy)
