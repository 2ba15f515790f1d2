"""After SIGKILL at any system call of a writer, the old or the new bundle exists and is complete."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whisperport.program.bundle import Bundle

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return []


@pytest.fixture
def killed(
    outcomes: list[dict[str, Any]], tmp_path: Path, write: Callable[..., Bundle]
) -> list[dict[str, Any]]:
    """Return the state after each kill; one process determines it for all tests."""
    if not outcomes:
        write(tmp_path / "template", b"old")
        script = Path(__file__).with_name("killed_writers.py")
        command = [sys.executable, str(script), str(tmp_path / "template"), str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        outcomes.extend(json.loads(line) for line in done.stdout.splitlines())
    return [outcome for outcome in outcomes if outcome["killed"]]


def test_writers_are_killed_at_all_their_steps(killed: list[dict[str, Any]]) -> None:
    steps = {outcome["step"] for outcome in killed}

    for name in ("mkdir", "open", "rename", "unlink", "rmdir", "_renameat2"):
        assert f"before call 1 of {name}" in steps
        assert f"after call 1 of {name}" in steps


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="renameat2")
def test_a_bundle_is_there_the_moment_its_writer_is_killed(killed: list[dict[str, Any]]) -> None:
    found = {outcome["at once"] for outcome in killed if outcome["in one step"]}

    assert found == {"old", "new"}


def test_the_next_writer_finds_a_bundle_also_where_two_renames_are_needed(
    killed: list[dict[str, Any]],
) -> None:
    assert {outcome["then"] for outcome in killed} == {"old", "new"}
    assert [o["step"] for o in killed if o["at once"] == "new" and o["then"] != "new"] == []


def test_the_next_writer_clears_the_leftovers_and_only_those(killed: list[dict[str, Any]]) -> None:
    assert {tuple(outcome["cleared"]) for outcome in killed} == {("nano", "notes.txt")}
    kinds = {name.rsplit("-", 1)[0] for outcome in killed for name in outcome["left"]}
    assert kinds == {
        *("nano", "notes.txt", ".nano.whisperport"),
        *(".nano.partial", ".nano.discarded", ".nano.replaced"),
    }
