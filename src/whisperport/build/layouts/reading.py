"""Read files that an app loads, whoever wrote them: which layout they have, and their arrays."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from numpy.typing import NDArray

from whisperport.errors import BundleError, ProgramError
from whisperport.program.strict_json import parse

T = TypeVar("T")
MAX_JSON_BYTES = 64 << 20  # a tokenizer.json of Whisper has 4 MB


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
        """Return what `reader` returns for a file; an empty name is the only file."""
        key = name, reader
        if key not in self._read:
            self._read[key] = reader(self.path / name)
        return cast(T, self._read[key])

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
    """

    recognize: Callable[[Files], bool]
    precisions: Callable[[Files], list[str]]
    arrays: Callable[[Files, str], Iterator[StoredArray]] | None = None


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise BundleError(f"it has more than {MAX_JSON_BYTES >> 20} MiB")
        value = parse(path.read_bytes(), path.name).json_object()
    except OSError as error:
        raise ProgramError(f"cannot read {path}", why=error.strerror or str(error)) from error
    except BundleError as error:
        raise ProgramError(
            f"{path.name} is damaged, or is not a JSON object",
            why=str(error),
            hint="export the model again",
        ) from error
    return value
