"""Open a `.tflite` file through its flatbuffer schema."""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whisperport.errors import ProgramError, needs


@contextmanager
def opened_tflite(path: Path) -> Iterator[tuple[Any, mmap.mmap]]:
    """Open a TFLite model: its root table, and the bytes of the file. Damage raises errors inside.

    Raises:
        ProgramError: the file is damaged or not a TFLite model; also when it is read in the block.
        MissingPackageError: the package tflite is not installed.
    """
    with needs("cannot read a .tflite file: the package tflite is not installed", extra="export"):
        from tflite.Model import Model
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield Model.GetRootAs(data), data
    except (struct.error, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise ProgramError(
            f"{path.name} is damaged, or is not a TFLite model",
            why=f"{type(error).__name__}: {error}"[:200],
            hint="convert the model again",
        ) from error
