"""A rejection says which words a precision costs; where few clips show none, it transcribes more."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from whisperport.build.export import not_verified as module
from whisperport.build.export.not_verified import not_verified
from whisperport.errors import CheckpointError
from whisperport.program.checks import Check
from whisperport.targets import RunOptions
from whisperport.verification import Report
from whisperport.verification.reference import Reference, ReferenceClip


def clip(name: str) -> ReferenceClip:
    none = np.empty((0, 4), np.float32)
    return ReferenceClip(name, "so they say", np.zeros(99, np.int16), (1,), (2,), none, none, none)


def words(differ: int, clips: int, *, passed: bool = True) -> Check:
    value = {"words": 9 * clips, "clips": clips, "differ": differ, "change": differ / 9 / clips}
    return Check(
        level="words",
        program="all programs",
        what="word error rate",
        value={**value, "increase_at_most": 1 / 3 / clips},
        rule="",
        passed=passed,
        reason="" if passed else f"{differ} more errors",
    )


ARRAYS = Check(
    level="arrays",
    program="encoder",
    what="clip 0",
    value={"sqnr_db": 5.7},
    rule="",
    passed=False,
    reason="SQNR 5.7 dB is below 10 dB",
)


class Rejected:
    """Rejections of a bundle whose reference has one clip, and how often more clips were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
        self.asked: list[list[str]] = []
        self.found = [words(4, 2, passed=False)]
        monkeypatch.setattr(module, "precisions", lambda *_: {"encoder": precision})
        monkeypatch.setattr(module, "check_words", self.check_words)

    def check_words(self, _: Any, reference: Reference, *__: Any) -> list[Check]:
        self.asked.append([one.name for one in reference.clips])
        return self.found

    def __call__(self, *checks: Check, more: Any = lambda: Reference((clip("further"),), 8)) -> str:
        bundle: Any = SimpleNamespace(
            reference=lambda: Reference((clip("own"),), 8).to_arrays(),
            manifest=SimpleNamespace(programs=()),
        )
        report = Report(subject="", checks=checks)
        return not_verified(Path("out"), report, bundle, RunOptions(), more).why


def test_more_clips_are_transcribed_if_the_words_show_no_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rejected = Rejected(monkeypatch, "w8a8")

    why = rejected(ARRAYS, words(0, 1))

    assert rejected.asked == [["own", "further"]]
    assert "4 more errors" in why.split("\n")[0]
    assert "words: 4 of 18 differ from float32's in 2 clips (WER +22.2 points" in why
    assert "none of 9" not in why


@pytest.mark.parametrize(
    ("precision", "check"), [("w8a8", words(3, 1, passed=False)), ("fp16", words(0, 1))]
)
def test_no_more_clips_where_words_were_lost_or_do_not_decide(
    precision: str, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejected = Rejected(monkeypatch, precision)

    assert "of 9 differ" in rejected(ARRAYS, check)

    assert rejected.asked == []


def test_a_bundle_is_rejected_also_if_more_clips_cannot_be_transcribed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> Reference:
        raise CheckpointError("the file is gone", why="deleted", hint="none")

    rejected = Rejected(monkeypatch, "w8a8")

    assert "none of 9 differs" in rejected(ARRAYS, words(0, 1), more=fail)
    assert "none of 9 differs" in rejected(ARRAYS, words(0, 1), more=None)
