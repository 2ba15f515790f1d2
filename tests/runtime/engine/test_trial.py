"""Bundles of unknown origin: which are tried, what a trial ends, and what it costs the machine."""

import importlib.metadata
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from whisperport.errors import BundleError
from whisperport.program.bundle import MANIFEST, Bundle
from whisperport.program.bundle.origin import record_own
from whisperport.program.placement import Placement
from whisperport.runtime import load_engine
from whisperport.runtime.engine import trial
from whisperport.runtime.engine.trial import limits_of
from whisperport.system.child import START_S
from whisperport.targets import RunOptions

from ...edited_bundles import constant_of, endless_step, foreign_bundle, growing_at_run_time
from ...embedded import default_bundle

GB = 10**9

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")


@pytest.fixture(autouse=True)
def nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trial, "_passed", set())


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The bundles that are tried from now on; none of these trials runs."""
    tried: list[Path] = []
    monkeypatch.setattr(trial, "try_bundle", lambda bundle, *_: tried.append(bundle.folder))
    return tried


@dataclass
class Peak:
    bytes: int = 0  # resident, of this process's children


@contextmanager
def measured() -> Iterator[Peak]:
    """The most memory that this process's children have at once."""
    peak, done = Peak(), threading.Event()

    def look() -> None:
        while not done.wait(0.005):
            peak.bytes = max(peak.bytes, sum(map(_resident, _children())))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def _children() -> Iterator[str]:
    for task in os.listdir("/proc/self/task"):
        try:
            yield from Path(f"/proc/self/task/{task}/children").read_text().split()
        except OSError:
            continue


def _command(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _resident(pid: str) -> int:
    """0 for a child that is still a copy of this process, before it runs its own command."""
    try:
        if _command(pid) == _command("self"):
            return 0
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_a_bundle_from_elsewhere_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = foreign_bundle(tmp_path / "bundle")

    with measured() as peak:
        load_engine(bundle)

    # then: it ran in a process of its own, and no other process tries it again
    assert 0.05 * GB < peak.bytes < limits_of(bundle).memory_bytes
    monkeypatch.setattr(trial, "_passed", set())
    monkeypatch.setattr(trial, "run_limited", None)
    load_engine(Bundle.open(bundle.folder))


def test_the_limits_of_a_small_bundle_are_below_two_gigabytes_and_thirty_seconds() -> None:
    limits = limits_of(Bundle.open(default_bundle()))

    assert limits.memory_bytes < 1.5 * GB
    assert limits.seconds <= 30


def test_a_program_without_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        trial, "BASE_S", 6.0
    )  # loading took above 2 s on a machine with a load of 8
    monkeypatch.setattr(trial, "BYTES_PER_S", 1e9)
    bundle = foreign_bundle(tmp_path / "bundle", step=endless_step())
    started = time.monotonic()

    with pytest.raises(BundleError) as caught:
        load_engine(bundle)

    # then: the failure is not recorded as a pass
    assert "failed its trial run" in caught.value.what
    assert (
        caught.value.why
        == f"running `step`: it took more than {limits_of(bundle).seconds:.0f} seconds"
    )
    assert "--trust" in caught.value.hint
    assert time.monotonic() - started < START_S + limits_of(bundle).seconds
    monkeypatch.setattr(trial, "try_bundle", _fails)
    with pytest.raises(AssertionError, match="tried"):
        load_engine(bundle)


def _fails(*_: Any) -> None:
    raise AssertionError("tried")


@pytest.mark.parametrize(
    ("step", "arguments"), [(constant_of, (80 * GB,)), (growing_at_run_time, (10 * GB, 40))]
)
def test_a_program_that_fills_the_memory_is_stopped(
    step: Any, arguments: tuple[int, ...], tmp_path: Path
) -> None:
    bundle = foreign_bundle(tmp_path / "bundle", step=step(*arguments))

    with measured() as peak, pytest.raises(BundleError) as caught:
        load_engine(bundle)

    assert "step" in caught.value.what + caught.value.why
    assert "1.2 GB of memory" in caught.value.hint
    assert peak.bytes < 1.9 * GB


def test_what_this_user_exported_or_trusts_is_not_tried(tmp_path: Path, trials: list[Path]) -> None:
    bundle = foreign_bundle(tmp_path / "bundle")

    own = Bundle.open(default_bundle())
    record_own(own.manifest)

    load_engine(own)
    load_engine(bundle, RunOptions(trust=True))

    assert not trials
    load_engine(bundle)
    assert trials == [bundle.folder]


def test_an_export_of_this_user_is_not_tried_until_it_was_changed(
    tmp_path: Path, trials: list[Path]
) -> None:
    own = foreign_bundle(tmp_path / "own", "my own")
    record_own(own.manifest)
    moved = tmp_path / "moved"
    os.rename(own.folder, moved)

    load_engine(Bundle.open(moved))
    foreign_bundle(moved, "changed")
    load_engine(Bundle.open(moved))

    assert trials == [moved]


def test_a_bundle_whose_hashes_were_not_checked_is_tried(
    tmp_path: Path, trials: list[Path]
) -> None:
    own = foreign_bundle(tmp_path / "own")
    record_own(own.manifest)

    load_engine(Bundle.open(own.folder, check_hashes=False))

    assert trials == [own.folder]


def test_other_options_and_versions_are_another_trial(
    tmp_path: Path, trials: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = foreign_bundle(tmp_path / "bundle")

    for options in ({}, {}, {"onnxruntime.provider": "CPUExecutionProvider"}):
        load_engine(bundle, RunOptions(options=options))
    monkeypatch.setattr(importlib.metadata, "version", lambda package: f"another {package}")
    load_engine(bundle)

    assert len(trials) == 3


def test_a_trial_does_not_need_the_device(tmp_path: Path) -> None:
    # given: an encoder for a chip, without the file that the chip runs
    bundle = foreign_bundle(tmp_path / "bundle")
    on_a_chip = [
        replace(entry, placement=Placement("hailo8l")) if entry.spec.name == "encoder" else entry
        for entry in bundle.manifest.programs
    ]
    manifest = replace(bundle.manifest, programs=tuple(on_a_chip))
    (bundle.folder / MANIFEST).write_bytes(manifest.to_bytes())
    bundle = Bundle.open(bundle.folder)

    # when, then: the program is missed when it is loaded, not before
    trial.try_bundle(bundle, RunOptions(), limits_of(bundle))
    with pytest.raises(BundleError, match="is not compiled"):
        load_engine(bundle)


def test_a_trial_is_of_the_bundle_that_was_opened(tmp_path: Path) -> None:
    bundle = foreign_bundle(tmp_path / "bundle")
    foreign_bundle(tmp_path / "bundle", "another")

    with pytest.raises(BundleError, match="replaced while it was being opened"):
        load_engine(bundle)


def test_a_daemon_process_tries_a_bundle_too(tmp_path: Path) -> None:
    """A daemon process may not have children of `multiprocessing`, and has this one."""
    bundle = foreign_bundle(tmp_path / "bundle")
    script = (
        "import multiprocessing, sys\n"
        "from whisperport import Bundle\n"
        "from whisperport.runtime import load_engine\n"
        "def load(): load_engine(Bundle.open(sys.argv[1]))\n"
        "process = multiprocessing.get_context('fork').Process(target=load, daemon=True)\n"
        "process.start(); process.join(); sys.exit(process.exitcode)"
    )

    done = subprocess.run([sys.executable, "-c", script, bundle.folder], timeout=300, check=False)

    assert done.returncode == 0
    assert is_recorded_as_tried(tmp_path)


def is_recorded_as_tried(folder: Path) -> bool:
    records = (folder / "state" / "whisperport" / "bundles").iterdir()
    return [record.name[:6] for record in records] == ["tried-"]
