"""Read Wyoming events from a peer that may send anything.

    {"type": "audio-chunk", "data_length": 49, "payload_length": 2048}\\n
    49 bytes of JSON, merged over "data" ── 2048 bytes of samples

The reader of the package `wyoming` reads as many bytes as the first line states, and returns nothing for a
line that is too long.
"""

import asyncio
from typing import Any

from wyoming.event import Event

from whisperport.apps.serving.json_text import parsed
from whisperport.apps.serving.turns import Turns


class FaultError(Exception):
    """An `error` event, after which the connection is closed: older clients wait for that.

    Args:
        code: bad-event, bad-audio, too-long, busy, language or internal.
        text: what happened, for people.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


MAX_LINE = 2**16  # bytes
MAX_PART = 2**20  # bytes of data, and of samples


async def read_event(reader: asyncio.StreamReader, turns: Turns) -> Event | None:
    """Read one event.

    Args:
        reader: with the limit `MAX_LINE`.
        turns: in which it is parsed.

    Returns:
        The event; None if the peer closed the connection, even within an event.

    Raises:
        FaultError: these bytes are no event, or a part is too long.
        OSError: the connection broke.
    """
    try:
        line = await reader.readuntil(b"\n")
        await turns.wait()
        head = _object(line)
        data, length = _member(head, "data"), _length(head, "data_length")
        if length:
            part = await reader.readexactly(length)
            await turns.wait()
            data = data | _object(part)
        payload = await reader.readexactly(_length(head, "payload_length"))
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError as error:
        raise FaultError(
            "bad-event", f"the first line of an event is longer than {MAX_LINE} bytes"
        ) from error
    if not isinstance(head.get("type"), str):
        raise FaultError("bad-event", "an event has no `type`")
    return Event(head["type"], data, payload or None)


def _object(text: bytes) -> dict[str, Any]:
    try:
        header = parsed(text)
    except ValueError as error:
        raise FaultError("bad-event", "a part of an event is not JSON") from error
    if not isinstance(header, dict):
        raise FaultError("bad-event", "a part of an event is not a JSON object")
    return header


def _member(head: dict[str, Any], name: str) -> dict[str, Any]:
    length = head.get(name)
    if length is None:
        return {}
    if not isinstance(length, dict):
        raise FaultError("bad-event", f"`{name}` of an event is not an object")
    return length


def _length(head: dict[str, Any], name: str) -> int:
    length = head.get(name)
    if length is None:
        return 0
    if type(length) is not int or not 0 <= length <= MAX_PART:
        raise FaultError(
            "bad-event", f"`{name}` of an event is not a number of 0 to {MAX_PART} bytes"
        )
    return length
