"""Read files that an app loads, whoever wrote them: which layout they have, and their arrays."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import BundleError, ProgramError, UsageError
from whisperport.program.strict_json import parse

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint
    from whisperport.model.inspection.read_pte import Method

T = TypeVar("T")
MAX_JSON_BYTES = 64 << 20  # a tokenizer.json of Whisper has 4 MB
LAST = 1024  # bytes, of which white space may be the last
MAX_FILES = 10_000  # the largest layout has 30


class Files:
    """The files that are judged; each is read once.

    Args:
        path: their folder, or the only file.
        checkpoint: of which they were made; None: not known.
    """

    def __init__(self, path: Path, checkpoint: "Checkpoint | None" = None) -> None:
        self.path, self.checkpoint = path, checkpoint
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

    def kept(self, key: object, make: Callable[[], T]) -> T:
        """Return what `make` returned the first time that it was asked for by this key."""
        if ("", key) not in self._read:
            self._read["", key] = make()
        return cast(T, self._read["", key])

    def read_now(self, name: str, reader: Callable[[Path], T]) -> T:
        """Do what `read` does, and keep nothing."""
        path = self.path / name
        try:
            return reader(path)
        except OSError as error:
            raise ProgramError(f"cannot read {path}", why=error.strerror or str(error)) from error
        except MemoryError as error:
            raise ProgramError(f"cannot read {path}", why="it is larger than memory") from error

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

    def largest(self) -> str:
        """Return the name of the largest file, which has the weights; of the only file, its own."""
        paths = [self.path] if self.path.is_file() else filter(Path.is_file, self.path.iterdir())
        return max(paths, key=lambda path: path.stat().st_size).name

    def json(self, name: str) -> dict[str, Any]:
        """Return the members of a JSON file; none if it is missing.

        Raises:
            ProgramError: it is not a JSON object, or too large.
        """
        return self.read(name, _json) if self.has(name) else {}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array of a file.

    Attributes:
        file: its path in the folder.
        name: in the file.
        values: integers whose step was not found are not multiplied by it.
        user: name of the node that reads it; empty: it has none, or is not known.
        step: of integers that were multiplied by it, in a shape that broadcasts; None: they were not.
    """

    file: str
    name: str
    values: NDArray[Any]
    user: str = ""
    step: NDArray[np.float32] | None = None


def in_steps(
    integers: NDArray[Any], scale: NDArray[Any], zero: NDArray[Any], *, axis: int
) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
    """Return integers (n, k) times their step, and the step; the integers if no axis has its size.

    Args:
        integers: of 8 bits.
        scale: the step of all, of each row or of each column.
        zero: the integer that stands for 0, in the same form or one number.
        axis: of the scale, if the axes are equally long.
    """
    size = scale.size
    if size not in (1, *integers.shape):
        return integers, None
    axis = axis if integers.shape[axis] == size or size == 1 else 1 - axis
    form = (-1, 1) if axis == 0 else (1, -1)
    step = scale.astype(np.float32).reshape(form)
    zeros = zero.astype(np.float32).reshape(form) if zero.size in (1, size) else np.float32(0)
    return (integers.astype(np.float32) - zeros) * step, step


@dataclass(frozen=True, slots=True)
class Reader:
    """How the files of a layout are read.

    Attributes:
        recognize: returns whether files have this layout.
        precisions: returns the precisions that are there, by their names.
        arrays: yields the arrays in the files of one precision, one at a time. None: `Layout.weights` does,
            or they cannot be read.
        sizes: returns what graphs or weights state, by its name in transformers' `config.json`.
        is_readable: whether the arrays can be read: of compiled files they cannot.
    """

    recognize: Callable[[Files], bool]
    precisions: Callable[[Files], list[str]]
    arrays: Callable[[Files, str], Iterator[StoredArray]] | None = None
    sizes: Callable[[Files], Mapping[str, int]] = lambda _files: {}
    is_readable: Callable[[Files], bool] = lambda _files: True


def pte_methods(path: Path) -> "Mapping[str, Method]":
    """Return the methods of an ExecuTorch program by their names.

    Raises:
        ProgramError: the file is damaged.
        MissingPackageError: ExecuTorch is not installed.
    """
    from whisperport.model.inspection.read_pte import read_pte

    return read_pte(path.read_bytes(), path.name)


def _unsafe(path: Path, why: str) -> ProgramError:
    return ProgramError(
        f"{path} is not read", why=why, hint="replace it by a copy of the file that belongs there"
    )


def early_end(path: Path, brackets: bytes) -> str:
    """Return "empty" or "cut off" of JSON that lacks the second of two brackets; empty: it does not."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(LAST).lstrip()
        file.seek(max(0, size - LAST))
        last = file.read().rstrip()
    if first[:1] not in (b"", brackets[:1]) or last[-1:] == brackets[1:]:
        return ""
    return "cut off" if size else "empty"


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise BundleError(f"it has more than {MAX_JSON_BYTES >> 20} MiB")
        value = parse(path.read_bytes(), path.name).json_object()
    except BundleError as error:
        state = early_end(path, b"{}") or "damaged, or is not a JSON object"
        raise ProgramError(
            f"{path.name} is {state}",
            why=str(error),
            hint="export the model again",
        ) from error
    return value
