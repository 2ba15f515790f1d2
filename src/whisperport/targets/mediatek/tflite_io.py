"""Read the inputs and outputs of a .tflite: those that the compiled program has on the device.

A board has no package that reads .tflite files, so this reads the few tables itself. Source of the field
numbers: tensorflow/compiler/mlir/lite/schema/schema.fbs. Every offset is checked against the file's size.
"""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whisperport.errors import BundleError
from whisperport.program.spec import ProgramSpec
from whisperport.targets.mediatek.device_io import DeviceIo, DeviceTensor

MAX_RANK = 8
# TensorType -> numpy's name; other types do not occur as inputs and outputs.
DTYPES = {0: "float32", 1: "float16", 2: "int32", 3: "uint8", 4: "int64", 6: "bool", 7: "int16"}
DTYPES |= {9: "int8", 10: "float64"}


def read_device_io(path: Path, spec: ProgramSpec) -> DeviceIo:
    """Return the inputs and outputs of a .tflite with their quantization, in the order of the file.

    Args:
        path: the .tflite; it has a signature with the program's name, or only one signature.
        spec: the program's signature.

    Raises:
        BundleError: the file is damaged, or has other inputs or outputs than the program.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = _read(data, spec.name)
    except (struct.error, ValueError, UnicodeDecodeError, OSError) as error:
        raise BundleError(
            f"cannot read the inputs and outputs of {path.name}",
            why=f"{type(error).__name__}: {error}"[:200],
            hint="export the bundle again, and compile it again",
        ) from error
    return DeviceIo.from_json(found.to_json(), spec)


class _Table:
    """A table of a flatbuffer."""

    def __init__(self, data: mmap.mmap, place: int) -> None:
        self._data, self._place = data, place
        self._fields = place - self._at("<i", place)
        self._size = self._at("<H", self._fields)

    def number(self, field: int, form: str, default: int) -> int:
        """Return a number; `form` as in `struct`."""
        place = self._field(field)
        return int(self._at(form, place)) if place else default

    def table(self, field: int) -> "_Table | None":
        place = self._field(field)
        return _Table(self._data, self._follow(place)) if place else None

    def tables(self, field: int) -> Iterator["_Table"]:
        start, count = self._vector(field, 4)
        return (_Table(self._data, self._follow(start + 4 * index)) for index in range(count))

    def numbers(self, field: int, form: str) -> list[float]:
        size = struct.calcsize(form)
        start, count = self._vector(field, size)
        return [self._at(form, start + size * index) for index in range(count)]

    def text(self, field: int) -> str:
        start, count = self._vector(field, 1)
        return self._data[start : start + count].decode("utf-8")

    def _vector(self, field: int, size: int) -> tuple[int, int]:
        """Return the place of the first element, and the number of elements of `size` bytes."""
        place = self._field(field)
        if not place:
            return 0, 0
        start = self._follow(place)
        count = self._at("<I", start)
        if start + 4 + count * size > len(self._data):
            raise ValueError(f"a list of {count} elements ends after the end of the file")
        return start + 4, int(count)

    def _field(self, field: int) -> int:
        """Return the place of a field; 0: the table does not have it."""
        entry = 4 + 2 * field
        offset = self._at("<H", self._fields + entry) if entry + 2 <= self._size else 0
        return self._place + int(offset) if offset else 0

    def _follow(self, place: int) -> int:
        return place + int(self._at("<I", place))

    def _at(self, form: str, place: int) -> Any:
        if place < 0:  # `struct` would count from the end
            raise ValueError("an offset is before the start of the file")
        (value,) = struct.unpack_from(form, self._data, place)
        return value


def _read(data: mmap.mmap, program: str) -> DeviceIo:
    model = _Table(data, struct.unpack_from("<I", data, 0)[0])
    signatures = {one.text(2): one for one in model.tables(7)}
    if program not in signatures and len(signatures) != 1:
        raise ValueError(f"it has no signature {program!r}, but {', '.join(signatures) or 'none'}")
    signature = signatures.get(program) or next(iter(signatures.values()))
    subgraphs = list(model.tables(2))
    subgraph = subgraphs[_index(signature.number(4, "<I", 0), len(subgraphs))]
    tensors = list(subgraph.tables(0))
    sides = []
    for side in (0, 1):  # inputs are field 0 of a signature and field 1 of a subgraph
        names = {one.number(1, "<I", 0): one.text(0) for one in signature.tables(side)}
        places = [_index(int(place), len(tensors)) for place in subgraph.numbers(side + 1, "<i")]
        sides.append(tuple(_tensor(names.get(place, ""), tensors[place]) for place in places))
    return DeviceIo(*sides)


def _index(index: int, count: int) -> int:
    if not 0 <= index < count:
        raise ValueError(f"there is no element {index} of {count}")
    return index


def _tensor(name: str, tensor: _Table) -> DeviceTensor:
    shape = tuple(int(axis) for axis in tensor.numbers(0, "<i"))
    if len(shape) > MAX_RANK:
        raise ValueError(f"{name[:80]!r} has rank {len(shape)}")
    quantization = tensor.table(4)
    scales = quantization.numbers(2, "<f") if quantization else []
    zero_points = quantization.numbers(3, "<q") if quantization else []
    if len(scales) > 1 or len(zero_points) > 1:
        raise ValueError(f"{name[:80]!r} has a scale per channel")
    kind = tensor.number(1, "<b", 0)
    return DeviceTensor(
        name=name,
        shape=shape,
        dtype=DTYPES.get(kind, f"type {kind}"),
        scale=scales[0] if scales else 0.0,
        zero_point=int(zero_points[0]) if scales and zero_points else 0,
    )
