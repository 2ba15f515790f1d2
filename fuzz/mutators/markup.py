"""Mutate XML: numbers, attributes, elements, entities and nesting."""

import re
from random import Random

from fuzz.mutators import OUTSIDE, TEXTS, number, raw

_NUMBER = re.compile(rb'(?<=[">,])-?\d+(?=["<,])')
_VALUE = re.compile(rb'(?<==")[^"]*(?=")')
_ELEMENT = re.compile(rb"<(\w+)[^>]*/>|<(\w+)[^>]*>[^<]*</\2>")
DEPTHS = (100, 10_000, 300_000)


def mutated(data: bytes, random: Random) -> bytes:
    """Return `data` with one to four changes."""
    for _ in range(random.randint(1, raw.MAX_CHANGES)):
        data = random.choice(CHANGES)(data, random)
    return data


def _chosen(pattern: re.Pattern[bytes], data: bytes, random: Random) -> slice | None:
    places = [match.span() for match in pattern.finditer(data)]
    return slice(*random.choice(places)) if places else None


def _replaced(data: bytes, place: slice | None, new: bytes) -> bytes:
    return data if place is None else data[: place.start] + new + data[place.stop :]


def _set_number(data: bytes, random: Random) -> bytes:
    return _replaced(data, _chosen(_NUMBER, data, random), str(number(random)).encode())


def _set_value(data: bytes, random: Random) -> bytes:
    values = [data[slice(*match.span())] for match in _VALUE.finditer(data)] or [b""]
    text = random.choice(TEXTS).encode("utf-8", "surrogatepass").replace(b'"', b"")
    new = random.choice(values) if random.random() < 0.5 else text
    return _replaced(data, _chosen(_VALUE, data, random), new)


def _repeat(data: bytes, random: Random) -> bytes:
    place = _chosen(_ELEMENT, data, random)
    return (
        data if place is None else _replaced(data, place, data[place] * random.choice((0, 2, 500)))
    )


def _nest(data: bytes, random: Random) -> bytes:
    place, depth = _chosen(_ELEMENT, data, random), random.choice(DEPTHS)
    return (
        data
        if place is None
        else _replaced(data, place, b"<dim>" * depth + data[place] + b"</dim>" * depth)
    )


def _declare_entities(data: bytes, random: Random) -> bytes:
    """Declare entities that would expand to gigabytes, or that are a file outside."""
    bomb = b"".join(
        b'<!ENTITY e%d "%s">' % (level, b"&e%d;" % (level - 1) * 10) for level in range(1, 12)
    )
    outside = f'<!ENTITY e11 SYSTEM "file://{OUTSIDE}/canary.bin">'.encode()
    declared = random.choice((b'<!ENTITY e0 "lol">' + bomb, outside))
    data = _replaced(data, _chosen(_VALUE, data, random), b"&e11;")
    head = data.find(b"<net")
    return data[:head] + b"<!DOCTYPE net [" + declared + b"]>" + data[head:]


def _damage(data: bytes, random: Random) -> bytes:
    return raw.mutated(data, random)


CHANGES = (
    *(_set_number, _set_number, _set_number, _set_value, _set_value),
    *(_repeat, _nest, _declare_entities, _damage),
)
