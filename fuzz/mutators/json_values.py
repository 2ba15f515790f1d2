"""Mutate JSON: values of wrong type or size, missing or repeated names, nesting, other encodings."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from fuzz.mutators import number, raw, text

# These are inserted as text, since Python's writer cannot write them.
LITERALS = {
    "@@deep list@@": "[" * 50_000 + "]" * 50_000,
    "@@deep object@@": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "@@long number@@": "1" * 5_000,
    "@@exponent@@": "1e99999",
    "@@minus zero@@": "-0",
}

Finish = Callable[[dict[str, Any]], dict[str, Any]]


def mutated(data: bytes, random: Random, outside: str, finish: Finish = lambda data: data) -> bytes:
    """Return a JSON object with one to three changes; `finish` may repair a checksum in it."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # it was damaged before
        return raw.mutated(data, random)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        value = _changed(value, random, outside)
    if isinstance(value, dict) and random.random() < 0.95:
        value = finish(value)
    written = json.dumps(value, ensure_ascii=random.random() < 0.5)
    for name, literal in LITERALS.items():
        written = written.replace(f'"{name}"', literal)
    if random.random() < 0.05:
        written = _doubled(written, random)
    encoded = written.encode(random.choice((*["utf-8"] * 12, "utf-16", "utf-8-sig")), "replace")
    return raw.mutated(encoded, random) if random.random() < 0.1 else encoded


def hostile(random: Random, outside: str) -> Any:
    """Return a random hostile value."""
    kind = random.random()
    if kind < 0.4:
        return number(random)
    if kind < 0.6:
        return text(random, outside)
    return random.choice(
        (
            *(None, True, False, 0.5, -1.5, 1e308, float("nan"), float("inf"), 10**400),
            *([], {}, [[]], [None], {"": None}, [1, 2], ["a"], {"a": 1}),
            *LITERALS,
        )
    )


def _changed(value: Any, random: Random, outside: str) -> Any:
    """Return `value` with a change at a random depth; deeper changes are rarer."""
    if isinstance(value, dict) and value:
        key = random.choice(list(value))
        if random.random() < 0.75:
            return value | {key: _changed(value[key], random, outside)}
        return _changed_object(value, key, random, outside)
    if isinstance(value, list) and value:
        place = random.randrange(len(value))
        if random.random() < 0.75:
            return [*value[:place], _changed(value[place], random, outside), *value[place + 1 :]]
        return _changed_list(value, place, random, outside)
    if isinstance(value, int) and not isinstance(value, bool) and random.random() < 0.6:
        return random.choice((value + 1, value - 1, -value, value * 2, number(random)))
    return hostile(random, outside)


def _changed_object(value: dict[str, Any], key: str, random: Random, outside: str) -> Any:
    others = {name: item for name, item in value.items() if name != key}
    other = random.choice(list(value))
    return random.choice(
        (
            others,
            others | {text(random, outside): value[key]},
            value | {text(random, outside): hostile(random, outside)},
            value | {key: value[other], other: value[key]},
            value | {key: value[other]},
            list(value.values()),
            {},
            hostile(random, outside),
        )
    )


def _changed_list(value: list[Any], place: int, random: Random, outside: str) -> Any:
    return random.choice(
        (
            value[:place] + value[place + 1 :],
            [*value, value[place]],
            value * (2 if len(value) > 1000 else 300),
            value[::-1],
            [*value, hostile(random, outside)],
            [],
            hostile(random, outside),
        )
    )


def _doubled(written: str, random: Random) -> str:
    """Repeat a name of an object."""
    places = [place for place, letter in enumerate(written[:5000]) if letter == "{"]
    place = random.choice(places or [0]) + 1
    return written[:place] + written[place:].split(",")[0] + "," + written[place:]
