"""Share the event loop: what is slow to parse waits for its turn, so that no client keeps it from others.

A few kilobytes can take long: chunks, frames or parts of a byte each, thousands of parameters in a header.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

SMALLEST, LARGEST = 2**10, 2**16  # bytes that are parsed in one turn
FAST_S = 0.001  # the next piece is larger if this one took less, in seconds
TURN_S = 0.002  # of one pass of the event loop, for all connections that were slow until now
SLOW_S = 0.003  # a connection is slow whose data took so long altogether


class Pace:
    """How many bytes are parsed in one turn: few at first, more while they take little time."""

    def __init__(self) -> None:
        self.n_bytes = SMALLEST
        self._began = self._spent = 0.0

    @property
    def is_slow(self) -> bool:
        """Whether all pieces together took long."""
        return self._spent > SLOW_S

    def begin(self) -> None:
        """A piece is parsed now."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """The piece was parsed."""
        seconds = time.perf_counter() - self._began
        self._spent += seconds
        self.n_bytes = min(2 * self.n_bytes, LARGEST) if seconds < FAST_S else SMALLEST


class Turns:
    """Lets one request at a time parse a piece of what it received, in one pass of the event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait(self) -> None:
        """Wait for a turn. It lasts until the caller waits for something else."""
        async with self._lock:
            await asyncio.sleep(0)

    async def pieces(self, stream: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a stream in pieces, each in a turn of its own."""
        pace = Pace()
        async for data in stream:
            at = 0
            while at < len(data):
                await self.wait()
                piece = data[at : at + pace.n_bytes]
                at += len(piece)
                pace.begin()
                yield piece
                pace.end()


class Received(Protocol):
    """A connection with data that it has not parsed."""

    pace: Pace

    def parse_some(self) -> bool:
        """Parse a piece; return whether there is more."""
        ...


class Connections:
    """Lets the connections of a server parse what they received: the slow ones wait for the others."""

    def __init__(self) -> None:
        self._fast, self._slow = deque[Received](), deque[Received]()
        self._is_due = False

    def add(self, connection: Received) -> None:
        """Let a connection parse its data soon."""
        (self._slow if connection.pace.is_slow else self._fast).append(connection)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_due = False
        for _ in range(len(self._fast)):
            self._parse(self._fast.popleft())
        end = time.perf_counter() + TURN_S
        while self._slow and time.perf_counter() < end:
            self._parse(self._slow.popleft())
        if (self._fast or self._slow) and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next)

    def _parse(self, connection: Received) -> None:
        try:
            has_more = connection.parse_some()
        except Exception as error:  # of this connection; the others go on
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a connection failed", "exception": error}
            )
        else:
            if has_more:
                self.add(connection)
