"""Several processes and one output: one writes, the others get an error, and readers are not affected."""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from whisperport.errors import BundleError
from whisperport.program.bundle import Bundle, check_writable, writing_bundle
from whisperport.program.bundle.staging import clear_leftovers, staging
from whisperport.system import locking

Write = Callable[..., Bundle]


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """Hold a lock as another process or container does: through a separate open file."""
    with open(lock, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_the_partial_folder_of_a_live_writer_is_never_deleted(tmp_path: Path, write: Write) -> None:
    """The other process may be invisible, since containers that share a volume do not share process ids."""
    partial = tmp_path / ".nano.partial-0123456789abcdef"
    partial.mkdir()
    (partial / "half").write_text("of a bundle")

    with held(tmp_path / ".nano.whisperport-lock"):
        with pytest.raises(BundleError, match="another process is writing"):
            write(tmp_path / "nano")
        clear_leftovers(tmp_path / "nano")

        assert (partial / "half").exists()

    clear_leftovers(tmp_path / "nano")
    assert os.listdir(tmp_path) == []


def test_a_second_writer_is_told_before_and_while_it_starts(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "nano", b"old")

    with writing_bundle(tmp_path / "nano") as writer:
        partial = writer.folder
        for attempt in (check_writable, lambda out: writing_bundle(out).__enter__()):
            with pytest.raises(BundleError, match="another process is writing") as refused:
                attempt(tmp_path / "nano")
        with pytest.raises(BundleError, match="another"), staging(tmp_path / "nano"):
            pytest.fail("two have the lock")
        assert partial.exists()
        assert "wait until it ends" in refused.value.hint
        for file in Bundle.open(tmp_path / "nano").manifest.files:
            (writer.folder / file).parent.mkdir(exist_ok=True)
            (writer.folder / file).write_bytes((tmp_path / "nano" / file).read_bytes())
        writer.commit(Bundle.open(tmp_path / "nano").manifest)

    check_writable(tmp_path / "nano")
    assert os.listdir(tmp_path) == ["nano"]


def test_of_writers_at_the_same_time_each_writes_or_is_told(tmp_path: Path, write: Write) -> None:
    """Each thread holds its own lock, as processes do."""
    outcomes: list[str] = []
    start = threading.Barrier(6)

    def compete(number: int) -> None:
        start.wait()
        try:
            write(tmp_path / "nano", str(number).encode())
            outcomes.append("written")
        except BundleError as error:
            outcomes.append(error.what)
        except BaseException as error:
            outcomes.append(repr(error))

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    told = f"another process is writing {tmp_path / 'nano'}"
    assert set(outcomes) <= {"written", told}
    assert "written" in outcomes
    assert len(outcomes) == 6
    assert Bundle.open(tmp_path / "nano")
    assert os.listdir(tmp_path) == ["nano"]


WRITER = """
import itertools, sys
from pathlib import Path
from whisperport.program.bundle import Bundle, writing_bundle

out = Path(sys.argv[1])
old = Bundle.open(out)
contents = {name: old.path(name).read_bytes() for name in old.manifest.files}
for number in itertools.count():
    with writing_bundle(out) as writer:
        for name, raw in contents.items():
            (writer.folder / name).parent.mkdir(exist_ok=True)
            (writer.folder / name).write_bytes(str(number).encode() if name.endswith(".bin") else raw)
        writer.commit(old.manifest)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="renameat2")
def test_readers_find_a_bundle_at_every_moment_of_many_replacements(
    tmp_path: Path, write: Write
) -> None:
    out = tmp_path / "nano"
    write(out)
    seen: set[str] = set()
    reads = 0
    with subprocess.Popen([sys.executable, "-c", WRITER, str(out)]) as writer:
        try:
            while len(seen) < 30:
                assert writer.poll() is None
                reads += 1
                folder = os.open(out, os.O_RDONLY)  # never missing
                try:
                    manifest, program = _read(folder, "manifest.json"), _read_program(folder)
                finally:
                    os.close(folder)
                if manifest is None:
                    continue  # an old one, which is being deleted
                entry = json.loads(manifest)["files"]["programs/encoder.bin"]
                if program is not None:
                    assert hashlib.sha256(program).hexdigest() == entry["sha256"]
                seen.add(entry["sha256"])
        finally:
            writer.kill()

    assert reads >= 30


def _read_program(folder: int) -> bytes | None:
    return _read(folder, "programs/encoder.bin")


def _read(folder: int, name: str) -> bytes | None:
    try:
        descriptor = os.open(name, os.O_RDONLY, dir_fd=folder)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        return file.read()


def test_where_there_are_no_locks_writers_leave_each_others_folders_alone(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = tmp_path / ".nano.partial-0123456789abcdef"
    partial.mkdir()

    def take(file: Any) -> bool:
        return False

    monkeypatch.setattr(locking, "_try_flock", take)
    write(tmp_path / "nano", b"new")

    assert Bundle.open(tmp_path / "nano")
    assert sorted(os.listdir(tmp_path)) == [partial.name, "nano"]
