"""The walks of ARCHITECTURE.md: functions that a value passes, each called by one before it."""

import ast
import inspect
import re
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")  # the walk of a checkpoint

PAGE = Path(__file__).parents[1] / "ARCHITECTURE.md"
MOST = 25  # stations
MOST_RETURNS = 3  # of a checkpoint, to rooms that it left


def read_walks(page: str) -> dict[str, list[str]]:
    """Heading of each walk -> its functions, as dotted names below the package."""
    (section,) = re.findall(r"^## Walks\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    headings = re.split(r"^### (.*)\n", section, flags=re.MULTILINE)[1:]
    return {
        heading: re.findall(r"^\d+\. `([\w.]+)`", text, re.MULTILINE)
        for heading, text in zip(headings[::2], headings[1::2], strict=True)
    }


WALKS = read_walks(PAGE.read_text(encoding="utf-8"))


def find(dotted: str) -> Any:
    """The function or class of a dotted name below the package."""
    parts = dotted.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            value = import_module(".".join(("whisperport", *parts[:length])))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            value = getattr(value, name)
        return value
    raise LookupError(dotted)


def called_in(function: Any) -> set[str]:
    """Every name that a function reads, with the names of what it reads them from left out."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def called_by(function: Any) -> set[str]:
    """Every name that a function reads, itself or through functions of its module."""
    beside = vars(inspect.getmodule(function))
    reached, unread = set[str](), {function.__name__: function}
    while unread:
        names = called_in(inspect.unwrap(unread.popitem()[1]))
        unread |= {
            name: beside[name]
            for name in names - reached
            if inspect.isfunction(beside.get(name))
            and beside[name].__module__ == beside["__name__"]
        }
        reached |= names
    return reached


def gaps(walk: list[str]) -> list[str]:
    """The stations that none of those before them calls, not even through functions of its module."""
    reached: set[str] = set()
    missing = []
    for place, station in enumerate(walk):
        if place and station.split(".")[-1] not in reached:
            missing.append(station)
        reached |= called_by(inspect.unwrap(find(station)))
    return missing


def returns(walk: list[str]) -> list[str]:
    """The stations at which the value comes back to one of the rooms that it had left."""
    rooms = [station.split(".")[0] for station in walk]
    return [
        walk[place]
        for place in range(1, len(walk))
        if rooms[place] != rooms[place - 1] and rooms[place] in rooms[:place]
    ]


def test_there_are_walks() -> None:
    assert WALKS
    assert all(1 < len(walk) <= MOST for walk in WALKS.values())


@pytest.mark.parametrize("heading", WALKS)
def test_each_station_of_a_walk_is_called_by_one_before_it(heading: str) -> None:
    assert not gaps(WALKS[heading])


def test_a_checkpoint_returns_to_rooms_that_it_left_at_most_three_times() -> None:
    (walk,) = (stations for heading, stations in WALKS.items() if "`export`" in heading)

    assert len(returns(walk)) <= MOST_RETURNS


def test_a_return_to_a_room_is_counted_however_long_the_value_stays_in_it() -> None:
    walk = ["build.a", "build.b", "model.a", "build.c", "build.d", "program.a", "model.b"]

    assert returns(walk) == ["build.c", "model.b"]


def test_a_station_that_nobody_calls_is_found() -> None:
    walk = ["build.export.export.export", "model.rewrites.rewrite.run_rewrites"]

    assert gaps(walk) == ["model.rewrites.rewrite.run_rewrites"]
