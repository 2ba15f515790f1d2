"""Programs of unknown origin are inspected in a child process, with the same result."""

import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

from whisperport.build import inspect as inspecting
from whisperport.build.inspect import InspectOptions, inspect
from whisperport.errors import ProgramError, UsageError
from whisperport.program.bundle.origin import record_own

from ..embedded import default_bundle
from ..foreign_bundle import constant_of, endless_step, foreign_bundle


def step() -> Path:
    return default_bundle() / "onnxruntime" / "step.onnx"


ONCE = InspectOptions(repeat=1, threads=1)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")


def test_a_child_finds_what_this_process_does() -> None:
    stages: list[str] = []

    (ours,) = inspect(step(), InspectOptions(repeat=1, threads=1, trust=True)).profiles
    (theirs,) = inspect(step(), ONCE, progress=stages.append).profiles

    assert {(node.name, node.where) for node in theirs.nodes} == {
        (node.name, node.where) for node in ours.nodes
    }
    assert (theirs.program, theirs.notes, theirs.runs) == (ours.program, ours.notes, ours.runs)
    assert all(node.ms is not None for node in theirs.nodes)
    assert stages == ["running step.onnx"]


def test_a_program_without_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspecting, "BASE_S", 2.0)
    monkeypatch.setattr(inspecting, "RUN_S", 0.0)
    path = tmp_path / "endless.onnx"
    onnx.save(endless_step(), path)

    with pytest.raises(ProgramError, match=r"(?s)took more than 2 seconds.*--trust"):
        inspect(path, ONCE)


def test_a_constant_of_80_gb_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "large.onnx"
    onnx.save(constant_of(80 * 10**9), path)

    with pytest.raises(ProgramError, match=r"(?s)cannot run large\.onnx.*--trust"):
        inspect(path, ONCE)


def test_errors_are_those_of_the_inspection() -> None:
    with pytest.raises(UsageError, match="no runtime option `speed`"):
        inspect(step(), InspectOptions(options={"speed": "high"}))


@pytest.mark.parametrize(("name", "is_limited"), [("own", False), ("somebody's", True)])
def test_only_bundles_of_others_are_limited(
    name: str, is_limited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited: list[Any] = []
    monkeypatch.setattr(
        inspecting,
        "run_limited",
        lambda *job: limited.append(job) or {"profiles": [], "skipped": [], "plans": []},
    )
    bundle = foreign_bundle(tmp_path / "bundle", name)
    if not is_limited:
        record_own(bundle.manifest)

    inspect(bundle.folder, InspectOptions(repeat=1, programs=("cross_kv",)))

    assert bool(limited) == is_limited


def test_limits_grow_with_the_weights_beside_a_program(tmp_path: Path) -> None:
    program = tmp_path / "model.onnx"
    program.write_bytes(b"graph")
    small = inspecting._limits_of(program, 5)
    with (tmp_path / "model.onnx.data").open("wb") as file:
        file.truncate(10**9)

    large = inspecting._limits_of(program, 5)

    assert small.memory_bytes < 1.5e9
    assert small.seconds < 30
    assert large.memory_bytes > 4e9
    assert large.seconds > 600
