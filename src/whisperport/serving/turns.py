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
TURN_S = 0.005  # of one pass of the event loop, for all connections


class Pace:
    """How many bytes are parsed in one turn: few at first, more while they take little time."""

    def __init__(self) -> None:
        self.n_bytes = 2 * SMALLEST
        self._began = 0.0

    def begin(self) -> None:
        """A piece is parsed now."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """The piece was parsed."""
        is_fast = time.perf_counter() - self._began < FAST_S
        self.n_bytes = min(2 * self.n_bytes, LARGEST) if is_fast else SMALLEST


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

    def parse_some(self) -> bool:
        """Parse a piece; return whether there is more."""
        ...


class Connections:
    """Lets the connections of a server parse what they received one after the other."""

    def __init__(self) -> None:
        self._waiting = deque[Received]()

    def add(self, connection: Received) -> None:
        """Let a connection parse its data soon."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        self._waiting.append(connection)

    def _next(self) -> None:
        end = time.perf_counter() + TURN_S
        try:
            while self._waiting and time.perf_counter() < end:
                connection = self._waiting[0]
                has_more = connection.parse_some()
                self._waiting.popleft()
                if has_more:
                    self._waiting.append(connection)
        except BaseException:
            self._waiting.popleft()
            raise
        finally:
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._next)
