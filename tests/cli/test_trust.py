"""`--trust`: a bundle of somebody else is loaded without a trial run."""

from pathlib import Path
from typing import Any

import pytest

from whisperport.errors import BundleError
from whisperport.runtime import trial

from ..foreign_bundle import foreign_bundle


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle whose trial fails."""

    def fails(*_: Any) -> None:
        raise BundleError("the trial failed")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trial, "try_bundle", fails)
    return foreign_bundle(tmp_path / "bundle").folder


def test_a_bundle_of_somebody_else_is_tried_unless_it_is_trusted(
    run: Any, foreign: Path, wav: Path
) -> None:
    # when
    tried = run("transcribe", wav, "--bundle", foreign)
    trusted = run("transcribe", wav, "--bundle", foreign, "--trust", "--threads", "1")

    # then: the next command can be copied
    assert (tried.code, tried.lines[0]) == (1, "error: the trial failed")
    assert trusted.code == 0
    assert "--trust" in trusted.lines[-1]


def test_a_bundle_of_somebody_else_is_measured_if_it_is_trusted(
    run: Any, foreign: Path, wav: Path
) -> None:
    # when
    tried = run("bench", foreign, wav)
    trusted = run("bench", foreign, wav, "--trust", "--threads", "1", "--repeat", "1")

    # then
    assert (tried.code, tried.lines[0]) == (1, "error: the trial failed")
    assert trusted.code == 0


def test_a_bundle_of_somebody_else_is_verified_if_it_is_trusted(run: Any, foreign: Path) -> None:
    # when
    tried = run("verify", foreign)
    trusted = run("verify", foreign, "--trust", "--threads", "1")

    # then
    assert (tried.code, tried.lines[0]) == (1, "error: the trial failed")
    assert trusted.code == 0
