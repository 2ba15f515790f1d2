"""Mutate bytes, for any format."""

import struct
from collections.abc import Callable, Sequence
from random import Random

from fuzz.mutators import number

WIDTHS = {1: "B", 2: "H", 4: "I", 8: "Q"}
MAX_CHANGES = 4  # changes to one input


def mutated(data: bytes, random: Random, others: Sequence[bytes] = ()) -> bytes:
    """Return `data` with one to four changes; `others` are files to splice with."""
    changed = bytearray(data)
    for _ in range(random.randint(1, MAX_CHANGES)):
        random.choice(CHANGES)(changed, random, others)
    return bytes(changed)


def _place(data: bytearray, random: Random) -> int:
    """Choose a place, often near the beginning (headers) or the end (indexes)."""
    if not data:
        return 0
    near = min(len(data), 400)
    where = random.random()
    if where < 0.4:
        return random.randrange(near)
    return len(data) - 1 - random.randrange(near) if where < 0.55 else random.randrange(len(data))


def _stretch(data: bytearray, random: Random) -> slice:
    start = _place(data, random)
    return slice(start, start + random.choice((1, 2, 4, 16, 100, 3000)))


def _flip(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    for _bit in range(random.choice((1, 1, 2, 8, 64))):
        if data:
            data[_place(data, random)] ^= 1 << random.randrange(8)


def _set_number(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    """Overwrite an integer of 1 to 8 bytes, mostly aligned, in either byte order."""
    width = random.choice(tuple(WIDTHS))
    place = _place(data, random)
    if random.random() < 0.7:
        place -= place % width
    if place + width > len(data):
        return
    form = random.choice("<>") + WIDTHS[width]
    value = number(random)
    if random.random() < 0.4:  # near the old value: a length or offset that is slightly wrong
        value = struct.unpack_from(form, data, place)[0] + random.randint(-8, 8)
    struct.pack_into(form, data, place, value % 256**width)


def _truncate(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    del data[_place(data, random) :]


def _delete(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    del data[_stretch(data, random)]


def _duplicate(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    stretch = _stretch(data, random)
    place = _place(data, random)
    data[place:place] = data[stretch] * random.choice((1, 1, 2, 50))


def _insert(data: bytearray, random: Random, _: Sequence[bytes]) -> None:
    place, count = _place(data, random), random.choice((1, 4, 64, 5000))
    data[place:place] = random.choice((bytes(count), b"\xff" * count, random.randbytes(count)))


def _splice(data: bytearray, random: Random, others: Sequence[bytes]) -> None:
    if not others:
        return
    other = bytearray(random.choice(others))
    data[_stretch(data, random)] = other[_stretch(other, random)]
    if random.random() < 0.2:
        data[_place(data, random) :] = other[_place(other, random) :]


Change = Callable[[bytearray, Random, Sequence[bytes]], None]
CHANGES: tuple[Change, ...] = (
    *(_flip, _flip, _set_number, _set_number, _set_number),
    *(_truncate, _delete, _duplicate, _insert, _splice),
)
