"""Locks between processes, containers and threads: all of them are open files of their own."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from whisperport.errors import WhisperportError
from whisperport.system import locking
from whisperport.system.locking import (
    is_locked,
    lock_path,
    locked,
    temporary_folder,
    try_lock,
    waiting_for_lock,
)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "RETRY_S", 0.02)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return lock_path(tmp_path / "nano")


def test_a_lock_is_held_by_one_and_leaves_no_file(path: Path) -> None:
    with locked(path) as first:
        with locked(path) as second:
            assert first is not None
            assert second is None
        assert is_locked(path)

    assert not is_locked(path)
    assert os.listdir(path.parent) == []


def test_a_lock_is_waited_for_and_the_wait_is_told_once(path: Path) -> None:
    told: list[str] = []
    first = try_lock(path)
    assert first is not None
    threading.Timer(0.1, first.release).start()  # longer than one attempt

    with waiting_for_lock(path, lambda: told.append("waiting")):
        assert is_locked(path)

    assert told == ["waiting"]
    assert not is_locked(path)


def test_a_free_lock_is_held_without_a_word(path: Path) -> None:
    with waiting_for_lock(path, lambda: pytest.fail("nobody holds it")):
        assert is_locked(path)


def test_a_killed_process_holds_its_lock_no_longer(path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from whisperport.system.locking import try_lock\n"
        "lock = try_lock(Path(sys.argv[1])); print(bool(lock), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"True\n"
        assert is_locked(path)

        process.kill()
        process.wait()

    assert path.exists()
    assert not is_locked(path)
    assert not path.exists()


def test_a_lock_file_that_was_removed_while_waiting_for_it_is_not_taken(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last holder removes it between another's opening and locking."""
    real, calls = fcntl.flock, 0

    def flock(descriptor: int, flags: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            path.unlink()
        real(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", flock)

    with locked(path) as lock:
        assert lock is not None
        assert calls == 2
        assert os.path.samestat(os.fstat(lock.file.fileno()), path.stat())


def test_a_file_that_another_process_has_made_since_is_not_removed(path: Path) -> None:
    lock = try_lock(path)
    assert lock is not None
    path.unlink()
    path.touch()

    lock.release()

    assert path.exists()


def test_a_file_of_the_users_with_the_name_of_a_lock_is_kept(path: Path) -> None:
    path.write_text("mine")

    with locked(path) as lock:
        assert lock is not None
    assert not is_locked(path)

    assert path.read_text() == "mine"


def test_a_link_is_not_opened(path: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    path.symlink_to(tmp_path / "thesis.tex")

    with pytest.raises(OSError, match="symbolic links"):
        try_lock(path)

    assert (tmp_path / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_is_warned_of(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    def flock(descriptor: int, flags: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)

    with locked(path) as lock:
        assert lock is not None
        assert not lock.is_exclusive

    assert "no locks" in caplog.text
    assert os.listdir(path.parent) == []
    # nor does a temporary folder delete another one, which may be in use
    monkeypatch.setattr(tempfile, "tempdir", str(path.parent))
    with temporary_folder() as first, temporary_folder():
        assert first.is_dir()


def test_another_error_of_the_system_is_passed_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, flags: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", flock)

    with pytest.raises(OSError, match="Input/output"):
        try_lock(path)


def test_the_next_temporary_folder_deletes_that_of_a_killed_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # given a folder of a process that was killed, one in use, and one of the user
    script = (
        "import os; from whisperport.system.locking import temporary_folder\n"
        "with temporary_folder() as folder:\n"
        "    (folder / '0.wav').write_bytes(b'audio')\n"
        "    os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(tmp_path)})
    (left,) = tmp_path.glob("whisperport-temporary-*")
    (tmp_path / "whisperport-temporary-of-mine").mkdir()
    # when the next ones are made
    with temporary_folder() as first, temporary_folder():
        # then only the first is gone
        assert first.is_dir()
        assert not left.exists()
    assert os.listdir(tmp_path) == ["whisperport-temporary-of-mine"]


def test_a_full_disk_of_temporary_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # given a disk that is full when a temporary file is written
    with (
        pytest.raises(WhisperportError, match="temporary files") as caught,
        temporary_folder(),
        open("/dev/full", "wb", buffering=0) as file,
    ):
        file.write(b"x")
    # then the error names its folder, and how to choose another one
    assert str(tmp_path) in caught.value.what
    assert "TMPDIR" in caught.value.hint
    assert os.listdir(tmp_path) == []
