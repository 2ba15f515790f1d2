"""A target is imported with the targets before it, and not with those after it."""

import subprocess
import sys

import pytest

from whisperport import targets
from whisperport.errors import UsageError
from whisperport.targets import TARGETS, get_target

from ..embedded import default_bundle

SHOW = "import sys, whisperport.targets as t; {}; print(*sorted(sys.modules), sep='\\n')"


def imported(code: str) -> set[str]:
    """Return the modules of targets that a new process has imported after it ran the code."""
    found = subprocess.run(
        [sys.executable, "-c", SHOW.format(code)], capture_output=True, text=True, check=True
    )
    return {name for name in found.stdout.split() if name.startswith("whisperport.targets.")}


def test_the_first_target_is_found_without_the_others() -> None:
    found = imported("t.get_target('onnxruntime')")

    assert "whisperport.targets.cpu.onnxruntime" in found
    assert not [name for name in found if name.endswith(".target")]


def test_a_transcriber_imports_the_targets_of_its_bundle_only() -> None:
    found = imported(
        f"from whisperport.transcription import Transcriber; Transcriber({str(default_bundle())!r})"
    )

    assert "whisperport.targets.cpu.onnxruntime" in found
    assert not [name for name in found if name.endswith(".target")]


def test_each_target_is_found_by_its_name_and_is_the_same_each_time() -> None:
    names = [target.spec.name for target in TARGETS]

    assert len(set(names)) == len(names) > 20
    assert [get_target(name) for name in names] == list(TARGETS)
    assert targets.TARGETS is TARGETS


def test_an_unknown_name_is_an_error_that_lists_all_targets() -> None:
    with pytest.raises(UsageError) as caught:
        get_target("mystery")

    assert all(target.spec.name in caught.value.hint for target in TARGETS)
    with pytest.raises(AttributeError, match="MYSTERY"):
        _ = targets.MYSTERY  # type: ignore[attr-defined]
