"""Killed and concurrent writers leave complete files."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fuzz.system_calls import KILL, Call, Fault, watched, why_not

from whisperport.errors import BundleError, WhisperportError
from whisperport.program.bundle import Bundle, replacing_files
from whisperport.program.bundle.replacing_files import put_files_in_place
from whisperport.program.bundle.staging import Staging, clear_leftovers, staging
from whisperport.program.bundle.writing import check_writable, writing_bundle
from whisperport.system import atomic, locking

# Files that belong together are replaced together, at whatever moment the writer is killed.

NAMES = ("p.bin", "p.host.json", "p.onnx")  # the output is the last
OLD = {"p.bin": "old weights", "p.onnx": "old program"}
NEW = {name: f"new {name}" for name in NAMES}
ALONE = {"p.txt": "the user's own"}


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> Callable[[], int]:
    """Kill the writer at its `step`-th change of the disk; return how many changes there were."""
    count = 0

    def counted(change: Any) -> Any:
        def run(*arguments: Any, **settings: Any) -> Any:
            nonlocal count
            count += 1
            if count == step:
                raise Killed
            return change(*arguments, **settings)

        return run

    monkeypatch.setattr(replacing_files, "rename_if_free", counted(replacing_files.rename_if_free))
    monkeypatch.setattr(replacing_files, "write_atomic", counted(replacing_files.write_atomic))
    for module, name in ((os, "rename"), (os, "unlink"), (os, "mkdir"), (os, "rmdir")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    return lambda: count


def prepared(folder: Path) -> Staging:
    for name, text in (OLD | ALONE).items():
        (folder / name).write_text(text)
    staged = Staging(folder / "p.onnx", "0123456789abcdef")
    staged.partial.mkdir()
    for name, text in NEW.items():
        (staged.partial / name).write_text(text)
    return staged


def put(staged: Staging) -> None:
    put_files_in_place(staged.partial, staged.files, staged.out, NAMES)


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def next_writer(out: Path) -> None:
    with staging(out):
        pass


def steps_of(folder: Path) -> int:
    folder.mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        staged = prepared(folder)
        count = kill_at(monkeypatch, 0)
        put(staged)
        return count()


def killed(folder: Path, step: int) -> Staging:
    """What a writer leaves in a new folder that is killed at a step; nothing happens after the last one."""
    folder.mkdir()
    staged = prepared(folder)
    with pytest.MonkeyPatch.context() as monkeypatch:
        kill_at(monkeypatch, step)
        with suppress(Killed):
            put(staged)
    return staged


def test_a_killed_writer_leaves_the_old_files_or_the_new_ones_to_the_next(tmp_path: Path) -> None:
    results = []

    for step in range(1, steps_of(tmp_path / "counted") + 2):
        folder = tmp_path / f"killed-{step}"
        staged = killed(folder, step)
        next_writer(staged.out)
        results.append(texts(folder))
        assert not staged.exists()

    assert OLD | ALONE in results
    assert NEW | ALONE in results
    assert all(found in (OLD | ALONE, NEW | ALONE) for found in results)


def test_a_kill_while_the_old_files_are_moved_back_loses_none(tmp_path: Path) -> None:
    last = steps_of(tmp_path / "counted") - 1

    for step in range(1, 40):
        folder = tmp_path / f"killed-{step}"
        folder.mkdir()
        staged = prepared(folder)
        with pytest.MonkeyPatch.context() as monkeypatch:
            kill_at(monkeypatch, last)
            with pytest.raises(Killed):
                put(staged)
        with pytest.MonkeyPatch.context() as monkeypatch:
            count = kill_at(monkeypatch, step)
            with suppress(Killed):
                replacing_files.restore_files(staged.partial, staged.files, staged.out)
        next_writer(staged.out)
        assert texts(folder) == OLD | ALONE
        if count() < step:
            return

    pytest.fail("moving back has no end")


def test_files_that_cannot_be_moved_back_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    staged = prepared(tmp_path)
    with pytest.MonkeyPatch.context() as monkeypatch:
        kill_at(monkeypatch, steps_of(tmp_path / "counted") - 1)
        with pytest.raises(Killed):
            put(staged)
    (tmp_path / "p.onnx").write_text("made by the user meanwhile")

    next_writer(staged.out)
    next_writer(staged.out)

    kept = {path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert {*OLD.values(), "made by the user meanwhile"} <= kept
    assert str(staged.files) in caplog.text


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_the_user_has_put_in_place_of_a_new_one_is_kept(
    tmp_path: Path, name: str
) -> None:
    for step in range(1, steps_of(tmp_path / "counted") + 2):
        folder = tmp_path / f"killed-{step}"
        staged = killed(folder, step)
        replaced = folder / "by the user"
        replaced.write_text("the user's")
        replaced.replace(folder / name)

        next_writer(staged.out)

        assert (folder / name).read_text() == "the user's"
        kept = {path.read_text() for path in folder.rglob("*") if path.is_file()}
        others = {text for one, text in OLD.items() if one != name}
        assert others <= kept or set(NEW.values()) - {NEW[name]} <= kept


def test_no_file_is_lost_with_the_folder_of_the_new_ones(tmp_path: Path) -> None:
    for step in range(1, steps_of(tmp_path / "counted") + 2):
        folder = tmp_path / f"killed-{step}"
        staged = killed(folder, step)
        shutil.rmtree(staged.partial)

        next_writer(staged.out)

        assert texts(folder) in (OLD | ALONE, NEW | ALONE)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_or_a_pipe_at_one_of_the_places_is_not_replaced(tmp_path: Path, name: str) -> None:
    for make in (Path.mkdir, os.mkfifo):
        staged = prepared(tmp_path)
        (tmp_path / name).unlink(missing_ok=True)
        make(tmp_path / name)
        before = (tmp_path / name).stat().st_ino

        with pytest.raises(WhisperportError, match="cannot write"):
            put(staged)

        next_writer(staged.out)
        assert (tmp_path / name).stat().st_ino == before
        if (tmp_path / name).is_dir():
            (tmp_path / name).rmdir()
        else:
            (tmp_path / name).unlink()


@pytest.mark.parametrize(
    "names",
    [
        "nojson",
        "[]",
        "{}",
        '{"victim.txt": [24, 0], "p.onnx": [1, 0]}',
        '{"p.bin": [3]}',
        "[" * 10**5,
    ],
)
def test_a_list_of_files_that_is_not_ours_moves_and_deletes_nothing(
    tmp_path: Path, names: str, caplog: pytest.LogCaptureFixture
) -> None:
    staged = prepared(tmp_path)
    (staged.files / replacing_files.OLD).mkdir(parents=True)
    (staged.files / replacing_files.NAMES).write_text(names)
    (tmp_path / "victim.txt").write_text("the user's own too")
    before = texts(tmp_path)

    next_writer(staged.out)

    assert texts(tmp_path) == before
    assert "is damaged" in caplog.text


def test_a_link_in_place_of_the_older_files_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    staged = prepared(tmp_path)
    (tmp_path / "talks").mkdir()
    (tmp_path / "talks/notes.txt").write_text("the user's own too")
    staged.files.mkdir()
    (staged.files / replacing_files.OLD).symlink_to(tmp_path / "talks")
    (staged.files / replacing_files.NAMES).write_text('{"p.onnx": [1, 0]}')

    next_writer(staged.out)

    assert texts(tmp_path / "talks") == {"notes.txt": "the user's own too"}
    assert "is damaged" in caplog.text


# After SIGKILL at any system call of a writer, the old or the new bundle exists and is complete.


def program(out: Path) -> str:
    try:
        return Bundle.open(out).path("programs/encoder.bin").read_text()
    except BundleError as error:
        return error.what


def write_again(out: Path, in_one_step: bool) -> None:
    """Write the bundle with other programs; called in a fork, in which it changes functions."""
    os.fsync = lambda _: None  # type: ignore[assignment]  # slow, and nothing is unplugged here
    if not in_one_step:
        atomic._renameat2 = lambda *_: False  # type: ignore[assignment]
    old = Bundle.open(out)
    with writing_bundle(out) as writer:
        for name in old.manifest.files:
            (writer.folder / name).parent.mkdir(exist_ok=True)
            raw = b"new" if name.endswith(".bin") else old.path(name).read_bytes()
            (writer.folder / name).write_bytes(raw)
        writer.commit(old.manifest)


@dataclass(frozen=True)
class Left:
    """What is there after a kill: the program, the names beside the bundle, and both after the next run."""

    at_once: str
    left: list[str]
    then: str
    cleared: list[str]


def killed_at(template: Path, folder: Path, call: Call | None, in_one_step: bool) -> Any:
    """Write a copy of a bundle, and kill before a call; None: return the calls."""
    shutil.rmtree(folder, ignore_errors=True)
    out = folder / "nano"
    shutil.copytree(template, out)
    (folder / "notes.txt").write_text("mine")
    fault = Fault(call, KILL) if call else None
    found = watched(partial(write_again, out, in_one_step), folder, fault)
    if fault is None:
        return found.calls
    assert found.met
    at_once, left = program(out), sorted(os.listdir(folder))
    with suppress(GivenUpError), writing_bundle(out):
        raise GivenUpError
    return Left(at_once, left, program(out), sorted(os.listdir(folder)))


class GivenUpError(Exception):
    """Raised to end a writer that only deletes leftovers."""


@pytest.mark.parametrize("in_one_step", [True, False])
def test_of_a_killed_writer_of_a_bundle_the_old_or_the_new_one_is_left(
    tmp_path: Path, write: Callable[..., Bundle], in_one_step: bool
) -> None:
    if why := why_not():
        pytest.skip(why)
    write(tmp_path / "template", b"old")
    place = partial(killed_at, tmp_path / "template", tmp_path / "work", in_one_step=in_one_step)

    kills = [place(call) for call in place(None)]

    assert {kill.then for kill in kills} == {"old", "new"}
    assert [kill for kill in kills if kill.at_once == "new" and kill.then != "new"] == []
    if in_one_step:
        assert {kill.at_once for kill in kills} == {"old", "new"}
    assert {tuple(kill.cleared) for kill in kills} == {("nano", "notes.txt")}
    kinds = {name.rsplit("-", 1)[0] for kill in kills for name in kill.left}
    hidden = {".nano.whisperport", ".nano.partial", ".nano.discarded"}
    hidden |= set() if in_one_step else {".nano.replaced"}
    assert kinds == {"nano", "notes.txt", *hidden}


# Several processes and one output: one writes, the others get an error, and readers are not affected.

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


def test_a_lock_file_that_cannot_be_deleted_is_no_error_and_the_next_writer_deletes_it(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = Path.unlink

    def fail_for_lock(path: Path, missing_ok: bool = False) -> None:
        if path.name.endswith("-lock"):
            raise PermissionError(errno.EACCES, "Permission denied")
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail_for_lock)
        write(tmp_path / "nano", b"new")
    assert Bundle.open(tmp_path / "nano")
    assert sorted(os.listdir(tmp_path)) == [".nano.whisperport-lock", "nano"]

    write(tmp_path / "nano", b"newer")

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
from whisperport.program.bundle import Bundle
from whisperport.program.bundle.writing import writing_bundle

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
