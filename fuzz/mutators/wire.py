"""Mutate protobuf messages without a schema: remove, repeat and nest fields, write wrong lengths."""

from dataclasses import dataclass, replace
from random import Random

from fuzz.mutators import number, raw, text

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
DEEPEST = 6  # levels of messages that are parsed
NESTED = 2000  # levels when a message is nested inside itself


@dataclass(frozen=True)
class Entry:
    """One field of a message; `lie` is added to the length that is written."""

    number: int
    kind: int
    value: "int | bytes | tuple[Entry, ...]"
    lie: int = 0


def mutated(data: bytes, random: Random, outside: str) -> bytes:
    """Return a message with one to four fields changed."""
    entries = parsed(data) or ()
    for _ in range(random.randint(1, 4)):
        entries = _changed(entries, random, outside)
    return written(entries)


def parsed(data: bytes, depth: int = 0) -> "tuple[Entry, ...] | None":
    """Return the fields of a message; None if it is not a valid message."""
    entries, place = [], 0
    while place < len(data):
        tag, place = _varint(data, place)
        kind = tag & 7
        value: int | bytes | tuple[Entry, ...]
        if tag >> 3 == 0 or place < 0:
            return None
        if kind == VARINT:
            value, place = _varint(data, place)
        elif kind in (FIXED64, FIXED32):
            width = 8 if kind == FIXED64 else 4
            value, place = data[place : place + width], place + width
        elif kind == BYTES:
            length, place = _varint(data, place)
            if place < 0 or place + length > len(data):
                return None
            value = data[place : place + length]
            place += length
            if length and depth < DEEPEST:
                value = parsed(value, depth + 1) or value
        else:
            return None
        if not 0 <= place <= len(data):
            return None
        entries.append(Entry(tag >> 3, kind, value))
    return tuple(entries)


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Return a number and the place after it; -1 if the number is truncated."""
    value = 0
    for count in range(10):
        if not 0 <= place + count < len(data):
            return 0, -1
        value |= (data[place + count] & 127) << 7 * count
        if data[place + count] < 128:
            return value, place + count + 1
    return 0, -1


def written(entries: "tuple[Entry, ...]") -> bytes:
    """Return the message as bytes."""
    out = bytearray()
    for entry in entries:
        out += _as_varint(entry.number << 3 | entry.kind)
        if isinstance(entry.value, int):
            out += _as_varint(entry.value)
            continue
        body = written(entry.value) if isinstance(entry.value, tuple) else entry.value
        if entry.kind == BYTES:
            out += _as_varint(max(0, len(body) + entry.lie))
        out += body
    return bytes(out)


def _as_varint(value: int) -> bytes:
    value %= 2**64
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _changed(entries: "tuple[Entry, ...]", random: Random, outside: str) -> "tuple[Entry, ...]":
    if not entries:
        return (Entry(random.randint(1, 20), VARINT, number(random)),)
    place = random.randrange(len(entries))
    entry = entries[place]
    before, after = entries[:place], entries[place + 1 :]
    if isinstance(entry.value, tuple) and random.random() < 0.8:
        inner = replace(entry, value=_changed(entry.value, random, outside))
        return (*before, inner, *after)
    change = random.randrange(8)
    if change == 0:
        return before + after
    if change == 1:
        return before + (entry,) * random.choice((2, 3, 200)) + after
    if change == 2 and entry.kind == BYTES:
        return (*before, replace(entry, lie=number(random)), *after)
    if change == 3:
        other = random.choice(entries)
        return (*before, replace(entry, kind=other.kind, value=other.value), *after)
    if change == 4:
        return (*before, replace(entry, number=random.randint(1, 30)), *after)
    if change == 5 and entry.kind == BYTES and random.random() < 0.3:
        return (*before, _nested(entry), *after)
    return (*before, replace(entry, value=_value(entry, random, outside)), *after)


def _value(entry: Entry, random: Random, outside: str) -> "int | bytes | tuple[Entry, ...]":
    if entry.kind == VARINT:
        return number(random)
    body = written(entry.value) if isinstance(entry.value, tuple) else entry.value
    if not isinstance(body, bytes) or entry.kind != BYTES:
        return random.randbytes(8 if entry.kind == FIXED64 else 4)
    if random.random() < 0.4:
        return text(random, outside).encode("utf-8", "surrogatepass")
    return raw.mutated(body, random)


def _nested(entry: Entry) -> Entry:
    """Nest a message inside itself many times."""
    body = b""
    for _ in range(NESTED):
        body = _as_varint(entry.number << 3 | BYTES) + _as_varint(len(body)) + body
    return replace(entry, value=body)
