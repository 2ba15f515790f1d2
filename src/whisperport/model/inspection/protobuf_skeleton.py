"""Read a protobuf file without its large arrays: a few megabytes of a 2 GB model.

A protobuf library keeps the file and the parsed copy in memory together. This reader walks the fields of
the file and skips every large array, so memory use depends on the number of nodes. Each length in the
file is checked before it is used.

Source: protobuf's wire format, https://protobuf.dev/programming-guides/encoding/.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

MAX_KEPT_BYTES = 4096  # bytes of an array that is kept: shapes, axes, scalars
# Bytes in memory of what is kept; the decoder of Whisper large has 2 MB without its weights.
MAX_SKELETON_BYTES = 1 << 28
FIELD_BYTES = 32  # of a field in memory, besides its content
MAX_DEPTH = 100  # messages inside each other; protobuf's own limit

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Walk:
    """How the fields of one kind of message are read; all other fields are kept as they are."""

    inner: Mapping[int, "Walk"] = field(default_factory=dict)  # number -> a message that is walked
    arrays: frozenset[int] = frozenset()  # numbers of the fields that are skipped if they are large
    skipped: bytes = b""  # fields to append to a message of which an array was skipped


@dataclass(slots=True)
class _Memory:
    """Bytes that may still be kept, of all messages of a file together."""

    left: int

    def take(self, length: int) -> None:
        self.left -= length
        if self.left < 0:
            raise ValueError(
                f"more than {MAX_SKELETON_BYTES} bytes remain without the large arrays"
            )


def skeleton(file: BinaryIO, end: int, walk: Walk) -> bytes:
    """Return the serialized message without its large arrays.

    Args:
        file: read from its current position.
        end: position of the message's end.
        walk: the kind of message.

    Raises:
        ValueError: the file is not a protobuf message, or what is kept is too large.
    """
    return b"".join(_message(file, end, walk, _Memory(MAX_SKELETON_BYTES), 0))


def _message(file: BinaryIO, end: int, walk: Walk, memory: _Memory, depth: int) -> Iterator[bytes]:
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} messages are nested")
    skipped = False
    while file.tell() < end:
        key, tag = varint(file, end)
        number = tag >> 3
        if not number:  # as in a file of zeros, which a download that was cut can be
            raise ValueError("a field has the number 0")
        memory.take(FIELD_BYTES)
        if tag & 7 != BYTES:
            yield key + _scalar(file, tag & 7, end)
            continue
        length, prefix = _length(file, end)
        if number in walk.inner:
            inner_end = file.tell() + length
            body = b"".join(_message(file, inner_end, walk.inner[number], memory, depth + 1))
            yield key + _as_varint(len(body)) + body
        elif number in walk.arrays and length > MAX_KEPT_BYTES:
            file.seek(length, 1)
            skipped = True
        else:
            memory.take(length)
            yield key + prefix + _read_exactly(file, length)
    if skipped:
        yield walk.skipped


def varint(file: BinaryIO, end: int) -> tuple[bytes, int]:
    """Read a number of variable length; return its bytes and its value."""
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
    prefix, length = varint(file, end)
    if file.tell() + length > end:
        raise ValueError(f"a field of {length} bytes is longer than the message that contains it")
    return length, prefix


def _scalar(file: BinaryIO, kind: int, end: int) -> bytes:
    if kind == VARINT:
        return varint(file, end)[0]
    if kind in (FIXED64, FIXED32):
        return _read_exactly(file, 8 if kind == FIXED64 else 4)
    raise ValueError(f"a field has the wire type {kind}")


def _read_exactly(file: BinaryIO, length: int) -> bytes:
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
