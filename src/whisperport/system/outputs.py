"""Declare what a command will write before its work begins, so that it replaces no file of the user.

Every output is compared with all inputs, with the other outputs and with what is at its path. Files are
compared as the file system sees them: through links, as hard links, and in other letter case where the
file system ignores it.
"""

import os
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whisperport.errors import UsageError
from whisperport.system.atomic import write_atomic
from whisperport.system.page import is_page
from whisperport.system.regular_file import other_kind

Kind = Literal["page", "file", "transcript", "folder", "bundle"]


@dataclass(frozen=True, slots=True)
class Output:
    """One path that a command will write.

    Attributes:
        path: the path.
        flag: the option that names it, such as `--html`.
        kind: `page` is an HTML page, which replaces only a page of whisperport; `file` replaces a regular
            file; `transcript` does so too, and its folder is made; `bundle` is a folder that is replaced as
            a whole; `folder` is a folder that gets files.
    """

    path: Path
    flag: str
    kind: Kind

    @property
    def is_file(self) -> bool:
        """Whether the output is one file, and not a folder."""
        return self.kind not in ("folder", "bundle")


def check_outputs(outputs: Sequence[Output], inputs: Iterable[str | os.PathLike[str]] = ()) -> None:
    """Check that the outputs may be written, before any work begins.

    Args:
        outputs: every path that the command will write.
        inputs: every path that the command reads, files and folders.

    Raises:
        UsageError: an output is an input or a file in one, would be written twice, or would replace
            something that whisperport did not write.
        FileNotFoundError: the working directory was deleted.
    """
    paths = list(inputs)
    # With each other first: a folder that another output will be is not one to create before.
    reasons = [_reason_among(output, outputs[:number]) for number, output in enumerate(outputs)]
    if not any(reasons):
        reasons = [reason_against(output, paths) for output in outputs]
    for output, reason in zip(outputs, reasons, strict=True):
        if reason:
            raise UsageError(
                f"cannot write `{output.flag} {output.path}`", why=reason[0], hint=reason[1]
            )


def reason_against(
    output: Output, inputs: Iterable[str | os.PathLike[str]]
) -> tuple[str, str] | None:
    """Return why an output may not be written and what to do next; None if it may."""
    choose = f"choose another path for `{output.flag}`"
    for path in inputs:
        if is_same(output.path, path):
            return f"it is the input `{os.fspath(path)}`, which would be replaced", choose
        if output.kind == "bundle" and is_inside(path, output.path):
            return f"the input `{os.fspath(path)}` is in this folder, which is replaced", choose
        replaces = output.kind in ("file", "transcript") and os.path.exists(output.path)
        if replaces and is_inside(output.path, path):
            return f"it is a file of the input `{os.fspath(path)}`", choose
    return _reason_at(output)


def is_same(path: str | os.PathLike[str], other_path: str | os.PathLike[str]) -> bool:
    """Whether two paths are, or will be, one file."""
    try:
        return os.path.samefile(path, other_path)
    except (OSError, ValueError):  # one does not exist, or a path has a NUL byte
        pass
    try:
        return _future_name(path) == _future_name(other_path)
    except (OSError, ValueError):
        return False


def is_inside(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    """Whether a path is, or will be, in a folder or in one of its subfolders."""
    try:
        return any(is_same(parent, folder) for parent in Path(os.path.realpath(path)).parents)
    except (OSError, ValueError):
        return False


def write_page(path: str | os.PathLike[str], page: str) -> None:
    """Write an HTML page; replace only a page that whisperport wrote.

    Raises:
        UsageError: another file has appeared at the path since it was checked.
        WhisperportError: the page cannot be written.
    """
    check_outputs([Output(Path(path), "--html", "page")])
    write_atomic(path, page.encode())


def _reason_at(output: Output) -> tuple[str, str] | None:
    """Return why an output cannot replace what is at its path."""
    path = output.path
    choose = f"choose another path for `{output.flag}`"
    try:
        path.stat()
        exists = True
    except FileNotFoundError:
        exists = False
    except (OSError, ValueError) as error:  # a circle of links, a name that is too long, a NUL byte
        return getattr(error, "strerror", None) or str(error), choose
    parent = Path(os.path.realpath(path)).parent
    kind = other_kind(path)
    if not output.is_file:
        return ("it is not a folder", choose) if exists and kind != "a folder" else None
    if kind:
        return f"it is {kind}", "give the path of a file"
    if output.kind == "page" and exists and not is_page(path):
        return (
            "a file that is not an HTML page of whisperport is there; it was not changed",
            f"{choose}, or delete that file",
        )
    if not parent.is_dir():
        if output.kind == "transcript":
            return None
        return "its folder does not exist", f"create the folder first: {parent}"
    if not os.access(parent, os.W_OK):
        if hasattr(os, "statvfs") and os.statvfs(parent).f_flag & os.ST_RDONLY:
            return "its file system is read-only", "choose a path on another one"
        return "the folder is not writable", "check its permissions"
    return None


def _reason_among(output: Output, earlier_outputs: Iterable[Output]) -> tuple[str, str] | None:
    """Return why an output collides with another one of the same command."""
    for earlier in earlier_outputs:
        named = f"`{earlier.flag} {earlier.path}`"
        if is_same(output.path, earlier.path):
            return f"{named} is the same path", "choose two different paths"
        for inner, outer in ((output, earlier), (earlier, output)):
            if outer.kind == "bundle" and is_inside(inner.path, outer.path):
                return (
                    f"{named}: one of the two is in the other, which is replaced as a whole",
                    "choose a path outside of that folder",
                )
    return None


def _future_name(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The path that a missing file will have, without the letter case that its file system ignores."""
    real = Path(os.path.realpath(path))
    existing = next(parent for parent in (real, *real.parents) if os.path.exists(parent))
    names = real.parts[len(existing.parts) :]
    if _ignores_case(existing):
        names = tuple(unicodedata.normalize("NFC", name).casefold() for name in names)
    return (*existing.parts, *names)


def _ignores_case(folder: Path) -> bool:
    """Whether an existing folder takes names in other letter case as the same; True if nothing tells."""
    for path in _with_letters(folder):
        try:
            return os.path.samestat(path.lstat(), path.with_name(path.name.swapcase()).lstat())
        except FileNotFoundError:
            return False
    return True


def _with_letters(folder: Path) -> Iterator[Path]:
    """Files in a folder, then it and those above it on its file system: those with ASCII letters in names.

    Other letters may have no counterpart in the other case.
    """
    device = folder.stat().st_dev
    with suppress(PermissionError), os.scandir(folder) as entries:
        yield from (Path(entry) for entry in entries if _has_letters(entry.name))
    for path in (folder, *folder.parents):
        if path.parent == path or path.parent.stat().st_dev != device:
            return
        if _has_letters(path.name):
            yield path


def _has_letters(name: str) -> bool:
    return name.isascii() and name != name.swapcase()
