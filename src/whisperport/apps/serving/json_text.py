"""JSON of clients that may send anything."""

import json
import re
from typing import Any

MAX_STRUCTURE = 10_000  # brackets, commas and colons: 10 ms, in which no other thread runs
MAX_DIGITS = 400  # of a whole number: the largest float has 309
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parsed(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON; has NaN, an infinity or a number of thousands of digits; has many
            thousands of members, or is nested deeply; or a text in it has a surrogate without its other
            half, which no answer can contain.
    """
    if isinstance(text, bytes):
        text = text.decode()
    if sum(map(text.count, "[{,:")) > MAX_STRUCTURE:
        raise ValueError(f"it has more than {MAX_STRUCTURE} members")
    try:
        value = json.loads(text, parse_int=_whole, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                "a text has a half of a surrogate pair, which is no character"
            ) from error
    return value


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")
