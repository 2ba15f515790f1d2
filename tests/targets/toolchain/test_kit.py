"""What stages share: versions, files that are complete or absent, and runs over samples."""

from pathlib import Path

import numpy as np
import pytest

from whisperport.targets import TARGETS
from whisperport.targets.toolchain import kit

REQUIRED = {"chip": "chip1", "sdk": "the-sdk", "oldest": [2, 7]}
WITH_REQUIREMENT = [
    one.compiler for one in TARGETS if one.compiler and "requires" in one.compiler.settings()
]


@pytest.mark.parametrize("version", ["2.7.0", "2.10.0", "3.0", "", "unknown"])
def test_versions_are_compared_as_numbers_and_an_unknown_one_is_accepted(version: str) -> None:
    assert kit.version_fault(version, REQUIRED) == ""


def test_an_older_version_is_rejected_with_both_versions() -> None:
    fault = kit.version_fault("1.24.0", REQUIRED)

    assert fault == "chip1 needs the-sdk 2.7 or later; version 1.24.0 is installed"


def test_another_major_version_is_rejected_where_the_chip_needs_the_same() -> None:
    required = {**REQUIRED, "sdk": "", "same_major": True}

    assert kit.version_fault("2.9", required) == ""
    assert "needs version 2.7 or a later 2.x" in kit.version_fault("3.0", required)


@pytest.mark.parametrize("compiler", WITH_REQUIREMENT, ids=lambda one: one.target)
def test_a_compiler_that_requires_a_version_rejects_the_one_before(compiler) -> None:
    required = compiler.settings()["requires"]
    major, minor = required["oldest"]

    assert kit.version_fault(f"{major}.{minor}.0", required) == ""
    before = f"{major}.{minor - 1}" if minor else f"{major - 1}.99"
    assert compiler.target in kit.version_fault(before, required)


def _stopped_in_the_middle(path: Path) -> None:
    with kit.written(path) as partial:
        partial.write_text("a part")
        raise LookupError


def test_a_file_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "made"
    path.write_text("before")

    with pytest.raises(LookupError):
        _stopped_in_the_middle(path)
    with pytest.raises(kit.NotWrittenError, match="made"), kit.written(path):
        pass
    assert [one.name for one in tmp_path.iterdir()] == ["made"]
    assert path.read_text() == "before"

    with kit.written(path) as partial:
        partial.write_text("after")
    assert path.read_text() == "after"


def test_a_program_runs_once_per_sample(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6.0).reshape(3, 2))

    kit.run_samples(tmp_path, {"x": "x.npy"}, ["y.npy"], lambda inputs: [2 * inputs["x"]])

    made = np.load(tmp_path / "y.npy")
    assert made.dtype == np.float32
    assert (made == 2 * np.arange(6.0).reshape(3, 2)).all()


@pytest.mark.parametrize("outputs", [None, [], [np.zeros(1)] * 2])
def test_other_outputs_than_the_program_has_are_an_error(tmp_path: Path, outputs) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 2)))

    with pytest.raises(kit.SimulationError, match="expected 1"):
        kit.run_samples(tmp_path, {"x": "x.npy"}, ["y.npy"], lambda _: outputs)

    assert not (tmp_path / "y.npy").exists()


def test_a_log_is_read_without_colours(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\x1b[31mE build:\x1b[0m no\xff\n")

    assert kit.read_log(tmp_path / "log") == "E build: no\ufffd\n"
    assert kit.read_log(tmp_path / "absent") == ""
