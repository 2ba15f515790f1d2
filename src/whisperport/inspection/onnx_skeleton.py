"""An ONNX file without its weights: what a report needs of a 2 GB model, in a few megabytes.

`onnx.load` holds the file and the parsed copy at once. This walks the file's fields and steps over every
large array, so memory follows the number of nodes, and a length that lies is found before it is believed.

Source: protobuf's wire format; field numbers from onnx/onnx.proto, IR version 10 and later.
"""

from collections.abc import Callable, Iterator
from typing import BinaryIO

MAX_KEPT_BYTES = 4096  # bytes of an array that is kept whole: shapes, axes, scalars
MAX_SKELETON_BYTES = 1 << 28  # bytes; Whisper large's decoder leaves 2 MB

MODEL_GRAPH, GRAPH_NODE, GRAPH_INITIALIZER, NODE_ATTRIBUTE = 7, 1, 5, 5
ATTRIBUTE_TENSOR = 5
TENSOR_ARRAYS = frozenset({4, 5, 6, 7, 9, 10, 11})  # float_, int32_, string_, int64_, raw_, …_data
TENSOR_IS_EXTERNAL = bytes(
    [14 << 3, 1]
)  # data_location: EXTERNAL, so that nobody looks for the data

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def skeleton(file: BinaryIO, size: int) -> bytes:
    """The serialized model, its large arrays left out and marked as stored elsewhere.

    Raises:
        ValueError: this is no protobuf message, or what is left is too large.
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
    left_out = False
    while file.tell() < end:
        key, tag = _varint(file, end)
        if tag & 7 == BYTES:
            length, prefix = _length(file, end)
            if tag >> 3 in TENSOR_ARRAYS and length > MAX_KEPT_BYTES:
                file.seek(length, 1)
                left_out = True
                continue
            yield key + prefix + _exactly(file, length)
        else:
            yield key + _scalar(file, tag & 7, end)
    if left_out:
        yield TENSOR_IS_EXTERNAL


Walk = Callable[[BinaryIO, int], Iterator[bytes]]


def _message(file: BinaryIO, end: int, inner: dict[int, Walk]) -> Iterator[bytes]:
    """A message's fields as they are, but for those that `inner` walks through."""
    while file.tell() < end:
        key, tag = _varint(file, end)
        if tag & 7 != BYTES:
            yield key + _scalar(file, tag & 7, end)
            continue
        length, prefix = _length(file, end)
        walk = inner.get(tag >> 3)
        if walk is None:
            yield key + prefix + _exactly(file, length)
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
    raise ValueError("a number is cut short")


def _length(file: BinaryIO, end: int) -> tuple[int, bytes]:
    prefix, length = _varint(file, end)
    if file.tell() + length > end:
        raise ValueError(f"a field of {length} bytes reaches beyond its end")
    return length, prefix


def _scalar(file: BinaryIO, kind: int, end: int) -> bytes:
    if kind == VARINT:
        return _varint(file, end)[0]
    if kind in (FIXED64, FIXED32):
        return _exactly(file, 8 if kind == FIXED64 else 4)
    raise ValueError(f"a field has the wire type {kind}")


def _exactly(file: BinaryIO, length: int) -> bytes:
    if length > MAX_SKELETON_BYTES:
        raise ValueError(f"a field of {length} bytes is no part of a graph")
    data = file.read(length)
    if len(data) != length:
        raise ValueError("it is cut short")
    return data


def _as_varint(number: int) -> bytes:
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    return bytes([*data, number])
