"""The one way to a file of a bundle: it is listed, it is a regular file, and it lies in the folder."""

import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from whisperport.errors import BundleError

DAMAGED = "copy the bundle again, or write it again with `whisperport export`"


@dataclass(frozen=True, slots=True)
class ListedFiles:
    """Files that may be read: those of a bundle, or of one of its programs, and no others."""

    folder: Path
    listed: frozenset[str]  # relative to the folder, as the manifest spells them

    def path(self, relative: str) -> Path:
        """Where a listed file is, with symbolic links resolved.

        Raises:
            BundleError: it is not listed, does not exist, is no regular file, or is a link that leads
                out of the folder.
        """
        if relative not in self.listed:
            raise BundleError(
                f"bundle {self.folder} does not list a file {relative!r}",
                why="only listed files are read, since only these were checked",
                hint=DAMAGED,
            )
        return regular_file(self.folder, relative)

    def beside(self, relative: str, name: str) -> Path:
        """Where the listed file `name` is, which lies in the same folder as the listed file `relative`.

        A runtime that is given the first file finds the second one by its name, so a link that leads
        elsewhere is rejected even if it stays inside of the bundle.

        Raises:
            BundleError: as `path`, or `name` is not the name of a file in the same folder.
        """
        if name != PurePosixPath(name).name:
            raise BundleError(
                f"{relative} in bundle {self.folder} refers to the file {name!r}",
                why="it may refer to files in its own folder only, by their names",
                hint=DAMAGED,
            )
        found = self.path((PurePosixPath(relative).parent / name).as_posix())
        if found != self.path(relative).parent / name:
            raise BundleError(
                f"bundle {self.folder} has a link in place of {name!r}, which {relative} refers to",
                hint=DAMAGED,
            )
        return found


def regular_file(folder: Path, relative: str) -> Path:
    """Where a file is, with links resolved. A link may stay inside; a pipe would block its reader.

    Raises:
        BundleError: it does not exist, is no regular file, or is a link that leads out of the folder.
    """
    try:
        real = (folder / relative).resolve(strict=True)
        inside = real.is_relative_to(folder.resolve(strict=True))
        regular = stat.S_ISREG(real.stat().st_mode)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise BundleError(
            f"{relative} in bundle {folder} cannot be read", why=str(error), hint=DAMAGED
        ) from error
    if not inside or not regular:
        raise BundleError(
            f"{relative} in bundle {folder} is not read",
            why="it is not a regular file"
            if inside
            else "it is a link that leads out of the bundle",
            hint=DAMAGED,
        )
    return real
