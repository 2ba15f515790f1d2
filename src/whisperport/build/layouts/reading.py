"""Read files that an app loads, whoever wrote them: which layout they have, and their arrays."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from numpy.typing import NDArray

from whisperport.errors import BundleError, ProgramError, UsageError
from whisperport.program.strict_json import parse

T = TypeVar("T")
MAX_JSON_BYTES = 64 << 20  # a tokenizer.json of Whisper has 4 MB
MAX_FILES = 10_000  # the largest layout has 30


class Files:
    """The files that are judged; each is read once.

    Args:
        path: their folder, or the only file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: dict[tuple[str, object], object] = {}

    def has(self, name: str) -> bool:
        """Return whether a file is there."""
        return (self.path / name).is_file()

    def read(self, name: str, reader: Callable[[Path], T]) -> T:
        """Return what `reader` returns for a file; an empty name is the only file, or the folder.

        Raises:
            ProgramError: the file cannot be read.
        """
        key = name, reader
        if key not in self._read:
            self._read[key] = self.read_now(name, reader)
        return cast(T, self._read[key])

    def read_now(self, name: str, reader: Callable[[Path], T]) -> T:
        """Do what `read` does, and keep nothing."""
        path = self.path / name
        try:
            return reader(path)
        except OSError as error:
            raise ProgramError(f"cannot read {path}", why=error.strerror or str(error)) from error

    def check_entries(self) -> None:
        """Check that the folder holds files and folders only, and no link to what is outside of it.

        A link to the store of a Hugging Face cache is allowed: its folders consist of such links.

        Raises:
            UsageError: there are too many files for the folder of an app.
            ProgramError: there is something else.
        """
        root = self.path.resolve()
        store = root.parents[min(1, len(root.parents) - 1)] / "blobs"
        count = 0
        for folder, folders, names in os.walk(root):
            for path in (Path(folder, name) for name in (*folders, *names)):
                target = Path(os.path.realpath(path))
                if not (target.is_relative_to(root) or target.parent == store):
                    raise _unsafe(path, f"it is a link to {target}, outside of the folder")
                if not (target.is_file() or target.is_dir()):
                    raise _unsafe(path, "it is neither a file nor a folder")
                count += 1
            if count > MAX_FILES:
                raise UsageError(
                    f"{self.path} has more than {MAX_FILES} files",
                    hint="give the folder that the app loads",
                )

    def json(self, name: str) -> dict[str, Any]:
        """Return the members of a JSON file; none if it is missing.

        Raises:
            ProgramError: it is not a JSON object, or too large.
        """
        return self.read(name, _json) if self.has(name) else {}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array of a file: its name there, and its values; integers are not yet multiplied by their step."""

    file: str
    name: str
    values: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Reader:
    """How the files of a layout are read.

    Attributes:
        recognize: returns whether files have this layout.
        precisions: returns the precisions that are there, by their names.
        arrays: yields the arrays in the files of one precision, one at a time. None: `Layout.weights` does.
        sizes: returns what graphs or weights state, by its name in transformers' `config.json`.
    """

    recognize: Callable[[Files], bool]
    precisions: Callable[[Files], list[str]]
    arrays: Callable[[Files, str], Iterator[StoredArray]] | None = None
    sizes: Callable[[Files], Mapping[str, int]] = lambda _files: {}


def _unsafe(path: Path, why: str) -> ProgramError:
    return ProgramError(
        f"{path} is not read", why=why, hint="replace it by a copy of the file that belongs there"
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise BundleError(f"it has more than {MAX_JSON_BYTES >> 20} MiB")
        value = parse(path.read_bytes(), path.name).json_object()
    except BundleError as error:
        raise ProgramError(
            f"{path.name} is damaged, or is not a JSON object",
            why=str(error),
            hint="export the model again",
        ) from error
    return value
