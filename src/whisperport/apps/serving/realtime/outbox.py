"""The events of a session, kept so that a client whose connection broke can read on."""

import asyncio
import json
import secrets
from collections import deque
from itertools import islice
from typing import Any

MAX_CHARACTERS = 4 * 2**20  # of kept events: days of speech
TENTATIVE = "conversation.item.input_audio_transcription.tentative"


class Outbox:
    """Events in order. Use it on the event loop's thread."""

    def __init__(self) -> None:
        self._events: deque[tuple[str, str]] = deque()  # id and JSON text
        self._first = 0  # number of the first kept event
        self._characters = 0
        self._new = asyncio.Event()
        self._tentative: int | None = None  # number of the last event with tentative words
        self._is_closed = False

    def put(self, kind: str, **members: Any) -> None:
        """Add an event; the oldest are dropped if there are too many."""
        if kind == TENTATIVE:
            self._forget_tentative()
            self._tentative = self.end
        event_id = f"event_{secrets.token_hex(12)}"
        text = json.dumps({"type": kind, "event_id": event_id, **members}, ensure_ascii=False)
        self._events.append((event_id, text))
        self._characters += len(text)
        self._drop_old()
        self._new.set()

    def close(self) -> None:
        """There are no more events after those that were added."""
        self._is_closed = True
        self._new.set()

    def _forget_tentative(self) -> None:
        """Remove the last tentative words: newer ones replace them."""
        if self._tentative is not None and self._tentative >= self._first:
            at = self._tentative - self._first
            self._characters -= len(self._events[at][1])
            self._events[at] = "", ""

    def _drop_old(self) -> None:
        while self._characters > MAX_CHARACTERS and len(self._events) > 1:
            self._characters -= len(self._events.popleft()[1])
            self._first += 1

    @property
    def end(self) -> int:
        """Number of events so far."""
        return self._first + len(self._events)

    def position_after(self, event_id: str | None) -> int:
        """Return the number of the event after one that the client has, or of the first one."""
        for number, (known, _) in enumerate(self._events, start=self._first):
            if event_id and known == event_id:
                return number + 1
        return self._first

    async def next(self, position: int) -> tuple[int, str]:
        """Wait for the event with this number; return the number of the one after it, and the event.

        Returns:
            The event as JSON; empty, if it was replaced by a newer one.

        Raises:
            EOFError: there are no more events.
        """
        while position >= self.end:
            if self._is_closed:
                raise EOFError
            self._new.clear()
            await self._new.wait()
        position = max(position, self._first)
        return position + 1, next(islice(self._events, position - self._first, None))[1]
