"""Bundles that tests share are exported once per run, and `make test` prints its CPU minutes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.verification.clips import Clip

from . import shared_exports
from .shared_exports import SharedExports

# What tests share is exported once per run, and no test changes it.


@pytest.fixture
def workers(
    micro_checkpoint: Any, fake_targets: Any, quick_tracing: None, tmp_path: Path
) -> list[SharedExports]:
    """Two workers of one run."""
    clips = [Clip("hiss", "", 0.1 * np.random.default_rng(0).standard_normal(3200, np.float32))]
    loaded = {"micro": lambda: micro_checkpoint}
    return [SharedExports(tmp_path / "run", loaded, {"micro": {"clips": clips}}) for _ in range(2)]


def test_the_second_worker_gets_what_the_first_has_exported(
    workers: list[SharedExports], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = workers
    bundle = first("fake", "micro")
    monkeypatch.delattr(shared_exports, "export")

    again = second("fake", "micro")

    assert again.folder == bundle.folder
    assert again.manifest == bundle.manifest
    assert first("fake", "micro") is bundle


def test_other_options_are_another_bundle(workers: list[SharedExports]) -> None:
    bundle = workers[0]("fake", "micro")

    placed = workers[0]("fake", "micro", placement={"encoder": "other"})

    assert placed.folder != bundle.folder
    assert placed.manifest.program("encoder").target == "other"


@pytest.mark.parametrize("change", ["written", "added", "removed"])
def test_a_file_that_a_test_changes_is_named(workers: list[SharedExports], change: str) -> None:
    first, second = workers
    bundle, _ = first("fake", "micro"), second("fake", "micro")
    assert first.changed() == []
    file = bundle.folder / ("new" if change == "added" else "tokenizer.json")

    file.unlink() if change == "removed" else file.write_text("{}")

    assert first.changed() == second.changed() == [f"{bundle.folder.name}/{file.name}"]


# What `make test` prints at its end.

SCRIPT = Path(__file__).with_name("cpu_minutes.py")


def run(command: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, SCRIPT, "make test", command]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60)


def test_the_last_line_is_the_cpu_time_and_the_exit_status_is_that_of_the_command() -> None:
    done = run("echo 3 failed; exit 3")

    assert done.stdout == "3 failed\nmake test: 0.0 CPU minutes\n"
    assert done.returncode == 3


def test_a_command_that_a_signal_ends_is_a_failure() -> None:
    assert run("kill -9 $$").returncode == 137
