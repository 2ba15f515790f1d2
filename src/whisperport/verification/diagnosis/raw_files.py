"""Read the files of a device: its outputs, bytes of unknown meaning, and how it stores tensors."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import BundleError, UsageError
from whisperport.program.json_records import from_json
from whisperport.program.runner import Array
from whisperport.program.strict_json import parse
from whisperport.system.array_files import KINDS, open_array
from whisperport.system.regular_file import other_kind
from whisperport.verification.diagnosis.expected import Quantization

Bytes = NDArray[np.uint8]

SUFFIXES = (".bin", ".npy", ".raw", ".dat", ".out", "")  # of files in a folder of outputs
LARGEST_JSON = 2**20  # bytes of a file of quantizations
LARGEST_FACTOR = 16  # largest size of a file, in multiples of the expected float32 array's
SPARE_BYTES = 2**20  # allowed beyond that, for small outputs


@dataclass(frozen=True, slots=True, eq=False)
class RawOutput:
    """The content of a file or an array.

    Attributes:
        source: the path, or "array".
        data: the bytes of the values, (n,) uint8.
        dtype: the dtype that the file or the array states; None for a headerless file.
        shape: the shape that it states; None for a headerless file.
    """

    source: str
    data: Bytes
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None


def raw_of(
    output: str | os.PathLike[str] | Array, expected_bytes: int, name: str = "array"
) -> RawOutput:
    """Return the bytes of a file or an array.

    Args:
        output: path of a headerless or an `.npy` file, or an array.
        expected_bytes: size of the expected output in float32; a file of more than 16 times that size and
            1 MiB is not read.
        name: what an array is called in messages.

    Raises:
        UsageError: the path is no regular file, is missing, empty or too large, or the array holds no
            numbers.
    """
    if isinstance(output, np.ndarray):
        return _of_array(output, name)
    path = Path(output)
    data = _content(path, LARGEST_FACTOR * expected_bytes + SPARE_BYTES)
    if data[:6] == b"\x93NUMPY":
        return _of_npy(path)
    return RawOutput(str(path), np.frombuffer(data, np.uint8))


def files_of(folder: Path, names: tuple[str, ...]) -> dict[str, Path]:
    """Return the files of a folder by the output's name: `NAME.bin`, `NAME.npy`, `NAME.raw` or the like.

    Raises:
        UsageError: no file has the name of an output, or two files have the same.
    """
    files: dict[str, Path] = {}
    for name in names:
        paths = [folder / f"{name}{suffix}" for suffix in SUFFIXES]
        there = [path for path in paths if os.path.lexists(path)]
        if len(there) > 1:
            raise UsageError(
                f"the output `{name}` has two files in {folder}",
                why=" and ".join(path.name for path in there),
                hint="delete one of them, or give a file instead of the folder",
            )
        if there:
            files[name] = there[0]
    if not files:
        example = ", ".join(f"{name}.bin" for name in names[:3])
        raise UsageError(
            f"{folder} has no file of an output",
            why=f"the program's outputs are {', '.join(names[:8])}{' …' if len(names) > 8 else ''}",
            hint=f"name each file after its output, such as {example}; or give NAME=FILE",
        )
    return files


def _content(path: Path, largest: int) -> bytes:
    try:
        if kind := other_kind(path):
            raise UsageError(
                f"cannot read the device's output {path}",
                why=f"it is {kind}",
                hint="give the path of a file",
            )
        with path.open("rb") as file:
            data = file.read(largest + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        raise UsageError(
            f"cannot read the device's output {path}",
            why=getattr(error, "strerror", None) or str(error),
            hint="give the path of the file that the device wrote",
        ) from error
    if not data:
        raise UsageError(
            f"the device's output {path} is empty",
            why="it has 0 bytes",
            hint="check that the program ran on the device, and that its disk is not full",
        )
    if len(data) > largest:
        raise UsageError(
            f"the device's output {path} is too large",
            why=f"it has more than {largest:,} bytes, {LARGEST_FACTOR} times the expected output",
            hint="give the file of one output of one run",
        )
    return data


def _of_npy(path: Path) -> RawOutput:
    try:
        array = open_array(path)
    except ValueError as error:
        raise UsageError(
            f"cannot read the device's output {path}",
            why=f"it begins as an .npy file, but: {error}",
            hint="write the file with numpy.save, without objects",
        ) from error
    return _of_array(array, str(path))


def _of_array(array: Array, source: str) -> RawOutput:
    if array.dtype.kind not in KINDS or array.size == 0:
        raise UsageError(
            f"the device's output {source} holds no numbers",
            why=f"it is an array of {array.dtype} of shape {array.shape}",
            hint="give an array of floats or integers with at least one value",
        )
    data = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    return RawOutput(source, data, array.dtype, array.shape)


def read_quantization(path: Path) -> dict[str, Quantization]:
    """Return the quantization of each tensor.

    Args:
        path: a JSON file, {"NAME": {"dtype": "int8", "scale": 0.05, "zero_point": 3}}.

    Raises:
        UsageError: the file is missing, is no such JSON, or a value is out of range.
    """
    try:
        if kind := other_kind(path):
            raise ValueError(f"it is {kind}")
        with path.open("rb") as file:
            data = file.read(LARGEST_JSON + 1)
        if len(data) > LARGEST_JSON:
            raise ValueError(f"it has more than {LARGEST_JSON:,} bytes")
        return dict(_entries(data))
    except (OSError, ValueError, BundleError) as error:
        raise UsageError(
            f"cannot read the quantization {path}",
            why=getattr(error, "strerror", None) or str(error),
            hint='write {"NAME": {"dtype": "int8", "scale": 0.05, "zero_point": 3}}',
        ) from error


def _entries(data: bytes) -> Iterator[tuple[str, Quantization]]:
    for name, field in parse(data, "the quantization").mapping().items():
        yield name, from_json(Quantization, field)
