"""Find files of a bundle: only files that are listed, are regular files, and are inside the folder."""

import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from whisperport.errors import BundleError

DAMAGED = "copy the bundle again, or export it again with `whisperport export`"
PERMISSION = (
    "make the bundle's folder and files readable for this user, for example with `chmod -R u+rX`"
)


@dataclass(frozen=True, slots=True)
class ListedFiles:
    """The files of a bundle, or of one of its programs, that may be read."""

    folder: Path
    listed: frozenset[str]  # paths relative to the folder, as in the manifest

    def path(self, relative: str) -> Path:
        """Return the path of a listed file, with symbolic links resolved.

        Raises:
            BundleError: the file is not listed, does not exist, is not a regular file, or is a link that
                leads out of the folder.
        """
        if relative not in self.listed:
            raise BundleError(
                f"bundle {self.folder} does not list the file {relative!r}",
                why="whisperport reads only files that the manifest lists",
                hint=DAMAGED,
            )
        return regular_file(self.folder, relative)

    def beside(self, relative: str, name: str) -> Path:
        """Return the path of the listed file `name` in the same folder as the listed file `relative`.

        A runtime that loads `relative` opens the other file by its name. A link to another folder is
        therefore rejected, even if it leads to a file of the bundle.

        Raises:
            BundleError: see `path`; or `name` is not the name of a file in the same folder.
        """
        if name != PurePosixPath(name).name:
            raise BundleError(
                f"{relative} in bundle {self.folder} refers to the file {name!r}",
                why="it may refer only to files in its own folder, by name",
                hint=DAMAGED,
            )
        file = self.path((PurePosixPath(relative).parent / name).as_posix())
        if file != self.path(relative).parent / name:
            raise BundleError(
                f"{name!r} in bundle {self.folder} is a link to another folder",
                why=f"{relative} refers to this file, and a link could lead to any file",
                hint=DAMAGED,
            )
        return file


def regular_file(folder: Path, relative: str) -> Path:
    """Return the path of a file in `folder`, with links resolved. Links inside the folder are followed.

    Raises:
        BundleError: the file does not exist, is not a regular file (a pipe would block its reader), or is
            a link that leads out of the folder.
    """
    try:
        real = (folder / relative).resolve(strict=True)
        inside = real.is_relative_to(folder.resolve(strict=True))
        regular = stat.S_ISREG(real.stat().st_mode)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise BundleError(
            f"{relative} in bundle {folder} cannot be read",
            why=str(error),
            hint=PERMISSION if isinstance(error, PermissionError) else DAMAGED,
        ) from error
    if not inside or not regular:
        raise BundleError(
            f"{relative} in bundle {folder} is rejected",
            why="it is not a regular file"
            if inside
            else "it is a link that leads out of the bundle",
            hint=DAMAGED,
        )
    return real
