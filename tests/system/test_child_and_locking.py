"""Jobs in a child process end and leave no process; locks hold between processes and threads."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fuzz.processes import has_ended

from whisperport.errors import MissingPackageError, WhisperportError
from whisperport.system import child, locking
from whisperport.system.child import KilledError, Limits, StoppedError, exit_reason, run_limited
from whisperport.system.locking import (
    is_locked,
    lock_path,
    locked,
    temporary_folder,
    try_lock,
    waiting_for_lock,
)
from whisperport.system.progress import reporting

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")

ENOUGH = Limits(2**30, 60)
MB = 10**6


@pytest.fixture(autouse=True)
def jobs_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def run(job: str, limits: Limits = ENOUGH, **arguments: Any) -> Any:
    return run_limited(f"limited_jobs:{job}", arguments, limits)


def is_gone(pid_file: Path) -> bool:
    """Whether the process of a `never_ends` ends within some seconds."""
    return has_ended(int(pid_file.read_text()), 5.0)


def test_the_result_comes_back_to_any_thread_and_nothing_reaches_the_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    # given: a name that is no UTF-8, as Python holds it
    arguments = {"name": "talk\udcff.wav", "number": 3}

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(run, "gives_back", **arguments).result()

    # then: standard input was empty
    assert answer == {**arguments, "stdin": ""}
    assert capfd.readouterr() == ("", "")


def test_the_stages_of_a_job_are_those_of_this_process() -> None:
    stages: list[str] = []

    with reporting(stages.append):
        run("gives_back")

    assert stages == ["giving back"]


def test_a_job_without_end_is_ended_and_its_stage_is_named(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    with pytest.raises(StoppedError, match="looping: it took more than 1 seconds"):
        run("never_ends", Limits(2**30, 1), pid_file=str(pid_file))

    assert is_gone(pid_file)


def test_one_allocation_above_the_limit_is_rejected_to_the_job() -> None:
    with pytest.raises(StoppedError, match="asking: MemoryError"):
        run("asks_for", Limits(500 * MB, 60), size=100_000 * MB)


def test_memory_that_the_kernel_does_not_limit_is_watched() -> None:
    with pytest.raises(StoppedError, match=r"growing: it used more than 0\.3 GB of memory"):
        run("grows_in_shared_memory", Limits(300 * MB, 60), step=20 * MB)


def test_a_crash_is_named_and_leaves_no_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(
        StoppedError, match=r"aborting: the process was ended by signal 6 \(SIGABRT\)"
    ):
        run("aborts")

    assert not list(tmp_path.iterdir())


def test_a_job_that_was_killed_is_told_from_one_that_crashed() -> None:
    with pytest.raises(KilledError, match="dying: the system killed the process"):
        run("is_killed")


def test_a_job_that_used_up_its_cpu_time_is_not_said_to_lack_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child, "MAX_THREADS", 1.0 / (child.START_S + ENOUGH.seconds))  # one second
    with pytest.raises(StoppedError, match="more CPU time than it may") as error:
        run("spins")
    assert not isinstance(error.value, KilledError)


def test_errors_of_the_package_come_back_as_they_were() -> None:
    with pytest.raises(MissingPackageError) as caught:
        run("fails")

    error = caught.value
    assert (error.what, error.why, error.hint) == (
        "there is no runtime",
        "it is not installed",
        "pip install x",
    )


def test_other_exceptions_are_named_by_their_first_line() -> None:
    with pytest.raises(StoppedError, match=r"^raising: KeyError: 'x\\ny'$"):
        run("raises")


def test_an_interrupt_ends_the_job(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def interrupt(*_: object) -> None:
        if pid_file.exists() and pid_file.read_text():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)

    try:
        with pytest.raises(KeyboardInterrupt):
            run("never_ends", pid_file=str(pid_file))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    assert is_gone(pid_file)


def test_a_killed_parent_takes_the_job_with_it(tmp_path: Path) -> None:
    # given: a script on standard input, without `if __name__ == "__main__"`
    pid_file = tmp_path / "pid"
    script = (
        f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"
        "from whisperport.system.child import Limits, run_limited\n"
        f"run_limited('limited_jobs:never_ends', {{'pid_file': {str(pid_file)!r}}}, Limits(2**30, 600))"
    )
    parent = subprocess.Popen([sys.executable, "-"], stdin=subprocess.PIPE, text=True)
    assert parent.stdin is not None
    parent.stdin.write(script)
    parent.stdin.close()
    while not (pid_file.exists() and pid_file.read_text()) and parent.poll() is None:
        time.sleep(0.02)

    parent.kill()
    parent.wait()

    assert is_gone(pid_file)


def test_the_current_folder_is_no_place_to_import_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("import os; os._exit(7)")
    (tmp_path / "numpy.py").write_text("import os; os._exit(7)")
    monkeypatch.chdir(tmp_path)

    assert run("gives_back")["stdin"] == ""


def test_a_process_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whisperport.system.child.get_executable", lambda: os.devnull)

    with pytest.raises(StoppedError, match="no process could be started"):
        run("gives_back")


@pytest.mark.parametrize(
    ("was_short", "reason"),
    [
        (False, "the process was ended by signal 9 (SIGKILL)"),
        (
            True,
            "the process was ended by signal 9 (SIGKILL); the system ended a process then because "
            "memory was short",
        ),
    ],
)
def test_memory_is_named_only_if_it_was_short(was_short: bool, reason: str) -> None:
    assert exit_reason(-9, was_memory_short=was_short) == reason


def test_a_signal_without_a_name_has_its_number() -> None:
    assert exit_reason(-50) == "the process was ended by signal 50"


# Locks: all of them are open files of their own


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
