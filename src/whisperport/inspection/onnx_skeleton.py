"""Read an ONNX file without its weights: a few megabytes of a 2 GB model.

`onnx.load` keeps the file and the parsed copy in memory together. This reader walks the fields of the file
and skips every large array, so memory use depends on the number of nodes. Each length in the file is
checked before it is used.

Source: protobuf's wire format; field numbers from onnx/onnx.proto, IR version 10 and later.
"""

from collections.abc import Callable, Iterator
from typing import BinaryIO

MAX_KEPT_BYTES = 4096  # bytes of an array that is kept: shapes, axes, scalars
MAX_SKELETON_BYTES = 1 << 28  # bytes; the decoder of Whisper large has 2 MB without its weights

MODEL_GRAPH, GRAPH_NODE, GRAPH_INITIALIZER, NODE_ATTRIBUTE = 7, 1, 5, 5
ATTRIBUTE_TENSOR = 5
TENSOR_ARRAYS = frozenset({4, 5, 6, 7, 9, 10, 11})  # float_, int32_, string_, int64_, raw_, …_data
TENSOR_IS_EXTERNAL = bytes([14 << 3, 1])  # data_location: EXTERNAL; the data is not in the message

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def skeleton(file: BinaryIO, size: int) -> bytes:
    """Return the serialized model without its large arrays, which are marked as stored elsewhere.

    Args:
        size: bytes in `file`.

    Raises:
        ValueError: the file is not a protobuf message, or a field that is kept is too large.
    """
    return b"".join(_model(file, size))


def _model(file: BinaryIO, end: int) -> Iterator[bytes]:
    return _message(file, end, {MODEL_GRAPH: _graph})


def _graph(file: BinaryIO, end: int) -> Iterator[bytes]:
    return _message(file, end, {GRAPH_INITIALIZER: _tensor, GRAPH_NODE: _node})


def _node(file: BinaryIO, end: int) -> Iterator[bytes]:
    return _message(file, end, {NODE_ATTRIBUTE: _attribute})


def _attribute(file: BinaryIO, end: int) -> Iterator[bytes]:
    return _message(file, end, {ATTRIBUTE_TENSOR: _tensor})


def _tensor(file: BinaryIO, end: int) -> Iterator[bytes]:
    skipped = False
    while file.tell() < end:
        key, tag = _varint(file, end)
        if tag & 7 == BYTES:
            length, prefix = _length(file, end)
            if tag >> 3 in TENSOR_ARRAYS and length > MAX_KEPT_BYTES:
                file.seek(length, 1)
                skipped = True
                continue
            yield key + prefix + _read_exactly(file, length)
        else:
            yield key + _scalar(file, tag & 7, end)
    if skipped:
        yield TENSOR_IS_EXTERNAL


Walk = Callable[[BinaryIO, int], Iterator[bytes]]


def _message(file: BinaryIO, end: int, inner: dict[int, Walk]) -> Iterator[bytes]:
    """Yield the fields of a message; the functions in `inner` process the fields with these numbers."""
    while file.tell() < end:
        key, tag = _varint(file, end)
        if tag & 7 != BYTES:
            yield key + _scalar(file, tag & 7, end)
            continue
        length, prefix = _length(file, end)
        walk = inner.get(tag >> 3)
        if walk is None:
            yield key + prefix + _read_exactly(file, length)
            continue
        body = b"".join(walk(file, file.tell() + length))
        yield key + _as_varint(len(body)) + body


def _varint(file: BinaryIO, end: int) -> tuple[bytes, int]:
    read = bytearray()
    while len(read) < 10 and file.tell() < end:
        byte = file.read(1)
        if not byte:
            break
        read += byte
        if byte[0] < 128:
            return bytes(read), sum((b & 127) << 7 * i for i, b in enumerate(read))
    raise ValueError("the file ends inside a number")


def _length(file: BinaryIO, end: int) -> tuple[int, bytes]:
    prefix, length = _varint(file, end)
    if file.tell() + length > end:
        raise ValueError(f"a field of {length} bytes is longer than the message that contains it")
    return length, prefix


def _scalar(file: BinaryIO, kind: int, end: int) -> bytes:
    if kind == VARINT:
        return _varint(file, end)[0]
    if kind in (FIXED64, FIXED32):
        return _read_exactly(file, 8 if kind == FIXED64 else 4)
    raise ValueError(f"a field has the wire type {kind}")


def _read_exactly(file: BinaryIO, length: int) -> bytes:
    if length > MAX_SKELETON_BYTES:
        raise ValueError(f"a field has {length} bytes; the limit is {MAX_SKELETON_BYTES}")
    data = file.read(length)
    if len(data) != length:
        raise ValueError("the file ends inside a field")
    return data


def _as_varint(number: int) -> bytes:
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    return bytes([*data, number])
