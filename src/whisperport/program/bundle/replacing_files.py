"""Move files that belong together to their places, where older ones may be: all of them, or none.

    parent of the output/
    ├── .NAME.partial-TOKEN/    the new files
    ├── .NAME.files-TOKEN/      while they are moved: the older files, and the list of the new ones
    ├── NAME                    the output, moved last
    └── …                       the files beside it

Between the first and the last move there is nothing at the output, so that no program reads the files of
another one. If the writer is killed then, the next writer of this output moves the older files back.
"""

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from whisperport.errors import WhisperportError
from whisperport.system.atomic import flush_rename, rename_if_free, write_atomic
from whisperport.system.regular_file import other_kind

NAMES = "names.json"
OLD = "old"


def put_files_in_place(new: Path, aside: Path, out: Path, names: Sequence[str]) -> None:
    """Move files to the folder of the output. After an error or a kill, `restore_files` moves them back.

    Args:
        new: folder that holds the new files.
        aside: folder for the older files; it does not exist yet.
        out: the output.
        names: names of the files; the last is that of the output.

    Raises:
        WhisperportError: a file has appeared at one of the places, or a folder or a device is there.
        OSError: a file cannot be moved.
    """
    places = [out.with_name(name) for name in names]
    for place in places:
        if kind := other_kind(place):
            raise _in_the_way(place, f"it is {kind}")
        with (new / place.name).open("rb") as written:
            os.fsync(written.fileno())
    if len(names) == 1:
        os.replace(new / out.name, out)
    else:
        old = aside / OLD
        old.mkdir(parents=True)
        marks = {name: _mark(new / name) for name in names}
        write_atomic(aside / NAMES, json.dumps(marks).encode())
        for place in reversed(places):  # the output first
            if os.path.lexists(place):
                os.rename(place, old / place.name)
        for place in places:
            if not rename_if_free(new / place.name, place):
                raise _in_the_way(place, "it has appeared while the files were written")
    flush_rename(out)


def restore_files(new: Path, aside: Path, out: Path) -> None:
    """End what `put_files_in_place` began: move the older files back, unless all new ones are in place.

    What it does depends only on what is on the disk, so it may be called at any time and repeatedly. A file
    that the user put at one of these paths in the meantime stays there.

    Raises:
        OSError: a file cannot be moved, or its place is taken; all files are kept.
    """
    if not (aside / NAMES).is_file():
        shutil.rmtree(aside)  # nothing was moved yet, or nothing is left to be moved
        return
    if (aside / OLD).is_symlink():  # what is there would be moved from where it leads
        raise OSError(f"{aside} is damaged: {OLD} is a link")
    marks = _marks(aside / NAMES, out)
    is_complete = new.is_dir() and not (new / out.name).exists()  # the output is moved last
    if not is_complete and _mark(out) != marks[out.name]:
        for name, mark in marks.items():
            if not (new / name).exists() and _mark(out.with_name(name)) == mark:
                out.with_name(name).unlink()
        old = sorted((aside / OLD).iterdir())
        collisions = [p for p in old if not rename_if_free(p, out.with_name(p.name))]
        if collisions:
            names = ", ".join(path.name for path in collisions)
            raise FileExistsError(f"there are other files of these names: {names}")
    (aside / NAMES).unlink()
    shutil.rmtree(aside)


def _mark(file: Path) -> list[int] | None:
    """Return size and time of change, by which a moved file is recognized; None: there is no file."""
    try:
        status = file.lstat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns]


def _marks(file: Path, out: Path) -> dict[str, list[int]]:
    """Read the list of the new files, name -> mark. It may be damaged or from another user.

    Raises:
        OSError: it has names that no file beside the output has.
    """
    try:
        marks = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise OSError(f"{file} is damaged: {error}") from error
    if not isinstance(marks, dict) or out.name not in marks:
        raise OSError(f"{file} is damaged: it does not have {out.name}")
    for name in marks.keys() - {out.name}:
        if not re.fullmatch(rf"{re.escape(out.stem)}\.[^/\0]+", name):
            raise OSError(f"{file} is damaged: {name!r} is no file beside {out.name}")
    return marks


def _in_the_way(place: Path, why: str) -> WhisperportError:
    return WhisperportError(
        f"cannot write {place}",
        why=why,
        hint="choose another output, or move it; nothing was written",
    )
