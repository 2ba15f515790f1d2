"""What tests share is exported once per run, and no test changes it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.verification.clips import Clip

from . import shared_exports
from .shared_exports import SharedExports


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
