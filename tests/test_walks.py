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


def gaps(walk: list[str]) -> list[str]:
    """The stations that none of those before them calls, not even through a function of its module."""
    reached: set[str] = set()
    missing = []
    for place, station in enumerate(walk):
        if place and station.split(".")[-1] not in reached:
            missing.append(station)
        function = inspect.unwrap(find(station))
        reached |= called_in(function)
        beside = vars(inspect.getmodule(function))
        reached |= {
            name
            for helper in called_in(function) & set(beside)
            if inspect.isfunction(beside[helper])
            and beside[helper].__module__ == beside["__name__"]
            for name in called_in(beside[helper])
        }
    return missing


def test_there_are_walks() -> None:
    assert WALKS
    assert all(1 < len(walk) <= MOST for walk in WALKS.values())


@pytest.mark.parametrize("heading", WALKS)
def test_each_station_of_a_walk_is_called_by_one_before_it(heading: str) -> None:
    assert not gaps(WALKS[heading])


def test_a_station_that_nobody_calls_is_found() -> None:
    walk = ["build.export.export.export", "model.rewrites.base.run_rewrites"]

    assert gaps(walk) == ["model.rewrites.base.run_rewrites"]
