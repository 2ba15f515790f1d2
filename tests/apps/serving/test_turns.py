"""Requests that are slow to parse: others are not kept waiting, and what is too much is not parsed."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.apps.serving.json_text import MAX_STRUCTURE, parsed
from whisperport.apps.serving.turns import LARGEST, SMALLEST, Connections, Pace, Turns

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("ab"), inner),
    max_leaves=10,
)


class Connection:
    """Has data that takes long to parse, or not."""

    def __init__(self, n_pieces: int, seconds: float, order: list["Connection"]) -> None:
        self.pace, self.left, self.order = Pace(), n_pieces, order
        self.pace._spent = seconds

    def parse_some(self) -> bool:
        self.order.append(self)
        self.left -= 1
        return self.left > 0


def test_connections_that_were_slow_wait_for_the_others() -> None:
    order: list[Connection] = []
    slow, fast = Connection(1000, 1, order), Connection(3, 0, order)

    async def test() -> None:
        connections = Connections()
        connections.add(slow)
        connections.add(fast)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order[0] is fast
        while slow.left:
            await asyncio.sleep(0)

    asyncio.run(test())

    assert order.count(fast) == 3
    assert order.count(slow) == 1000


def test_a_connection_that_fails_does_not_stop_the_others() -> None:
    order: list[Connection] = []
    failing, other = Connection(1, 0, order), Connection(2, 0, order)
    failing.parse_some = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        connections = Connections()
        connections.add(failing)
        connections.add(other)
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(test())

    assert order == [other, other]


def test_one_request_has_a_turn_in_a_pass_of_the_loop() -> None:
    turns, taken = Turns(), 0

    async def request() -> None:
        nonlocal taken
        await turns.wait()
        taken += 1

    async def test() -> list[int]:
        tasks = [asyncio.create_task(request()) for _ in range(5)]
        counts = []
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            counts.append(taken)
        return counts

    counts = asyncio.run(test())

    assert all(after - before <= 1 for before, after in pairwise(counts))
    assert counts[-1] == 5


def test_pieces_of_a_body_are_small_at_first_and_join_to_it() -> None:
    body = bytes(range(256)) * 2000

    async def stream() -> AsyncIterator[bytes]:
        yield body[:300_000]
        yield b""
        yield body[300_000:]

    async def test() -> list[bytes]:
        return [piece async for piece in Turns().pieces(stream())]

    pieces = asyncio.run(test())

    assert b"".join(pieces) == body
    assert len(pieces[0]) == SMALLEST
    assert max(map(len, pieces)) <= LARGEST


@given(JSON)
def test_json_is_read_as_python_does(value: object) -> None:
    for ascii_only in (True, False):
        assert parsed(json.dumps(value, ensure_ascii=ascii_only)) == value


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "[",
            "{}x",
            "NaN",
            "[Infinity]",
            "-Infinity",
            "[" * 100_000,
            "9" * 401,
            "-" + "9" * 5_000,
        ),
        *(
            r'"\ud800"',
            r'{"\uDFFF": 0}',
            r'["\udc00\ud800"]',
            b"\xff",
            "[" + "0," * MAX_STRUCTURE + "0]",
        ),
    ],
)
def test_json_that_could_harm_is_an_error_of_value(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parsed(text)


def test_a_character_of_two_surrogates_is_no_error() -> None:
    assert parsed(r'"\ud83d\ude00"') == "\U0001f600"
