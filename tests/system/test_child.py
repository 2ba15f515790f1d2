"""Jobs in a child process: limits, ends, and that no process remains."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fuzz.processes import has_ended

from whisperport.errors import MissingPackageError
from whisperport.system import child
from whisperport.system.child import KilledError, Limits, StoppedError, exit_reason, run_limited
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
