"""`--trust`: a bundle of somebody else is loaded without a trial run."""

from pathlib import Path
from typing import Any

import pytest

from whisperport.errors import BundleError
from whisperport.runtime.engine import trial

from ...extent import core_or_all
from ...foreign_bundle import foreign_bundle


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle whose trial fails."""

    def fails(*_: Any) -> None:
        raise BundleError("the trial failed")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trial, "try_bundle", fails)
    return foreign_bundle(tmp_path / "bundle").folder


@pytest.mark.parametrize(
    "command",
    [
        ("transcribe", "WAV", "--bundle", "BUNDLE"),
        ("verify", "BUNDLE"),
        *core_or_all((), [("bench", "BUNDLE", "WAV", "--repeat", "1")]),
    ],
    ids=lambda command: command[0],
)
def test_a_bundle_of_somebody_else_is_tried_unless_it_is_trusted(
    run: Any, foreign: Path, wav: Path, command: tuple[str, ...]
) -> None:
    given = [{"WAV": wav, "BUNDLE": foreign}.get(word, word) for word in command]

    tried = run(*given)
    trusted = run(*given, "--trust", "--threads", "1")

    assert (tried.code, tried.lines[0]) == (1, "error: the trial failed")
    assert trusted.code == 0
    if command[0] == "transcribe":
        assert "--trust" in trusted.lines[-1]  # the next command can be copied
