"""Jobs that print much, fail, hang, crash or are killed: a short error, and the details in a log."""

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from whisperport.apps.cli import watchdog
from whisperport.apps.cli.watchdog import run_watched
from whisperport.errors import LoweringError, MissingPackageError, UsageError, WhisperportError
from whisperport.system.progress import reporting

from . import watched_jobs as jobs

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "bundle"


@pytest.fixture(autouse=True)
def logs_go_here(tmp_path, monkeypatch):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(watchdog.tempfile, "tempdir", str(folder))
    yield
    assert not list(folder.iterdir()), "a log was left behind"


def test_a_flood_is_not_seen_and_the_result_comes_back(out, capfd, caplog):
    stages = []

    with caplog.at_level(logging.WARNING), reporting(stages.append):
        result = run_watched(jobs.floods, 21, out=out)

    assert result == 42
    assert stages == ["flooding"]
    assert capfd.readouterr() == ("", "")
    assert [record.getMessage() for record in caplog.records] == ["a warning of whisperport"]
    assert not list(out.parent.glob("bundle*"))


def test_a_failure_is_three_lines_with_the_rest_in_a_log_beside_the_output(out, capfd):
    with pytest.raises(LoweringError) as failed:
        run_watched(jobs.fails_with_400_lines, out=out)

    assert str(failed.value).count("\n") == 2
    assert failed.value.why == "aten::triu is not supported"
    assert failed.value.hint == f"the complete log is in {out}.log"
    log = out.with_name("bundle.log").read_text()
    assert log.startswith("[lowering]\n")
    assert "%399 : Tensor = aten::triu(%x)" in log
    assert capfd.readouterr() == ("", "")


def test_a_log_stays_where_it_is_if_it_cannot_be_put_beside_the_output(tmp_path):
    with pytest.raises(LoweringError) as failed:
        run_watched(jobs.fails_with_400_lines, out=tmp_path / "no" / "such" / "folder")

    log = Path(failed.value.hint.removeprefix("the complete log is in "))
    assert "aten::triu" in log.read_text()
    log.unlink()


def test_a_hang_in_c_is_stopped_named_and_located_and_its_partial_work_cleared(out, monkeypatch):
    monkeypatch.setattr(watchdog, "GRACE_S", 0.5)
    out.mkdir()

    with pytest.raises(LoweringError) as hung:
        run_watched(jobs.leaves_a_partial_folder_and_hangs, out, out=out, stall_s=3)

    assert hung.value.what == "stopped: `lowering 6 programs` made no progress"
    assert hung.value.why == "it reported nothing for 3 seconds"
    assert f"{out}.log" in hung.value.hint
    assert "in leaves_a_partial_folder_and_hangs" in out.with_name("bundle.log").read_text()
    assert sorted(p.name for p in out.parent.iterdir()) == ["bundle", "bundle.log", "tmp"]


def test_what_a_killed_child_left_beside_its_outputs_is_cleared(out):
    other = out.parent / "link"
    other.symlink_to(out.parent / "elsewhere" / "other")

    with pytest.raises(LoweringError, match="killed"):
        run_watched(jobs.is_killed_while_it_writes, out, other, out=out, writes=other)

    assert sorted(p.name for p in out.parent.iterdir()) == [
        *("bundle.log", "elsewhere", "link", "tmp")
    ]
    assert not list((out.parent / "elsewhere").iterdir())


def test_a_hang_in_python_gets_the_time_to_tidy_up(out):
    with pytest.raises(LoweringError, match="made no progress"):
        run_watched(jobs.hangs_in_python, out, out=out, stall_s=3)

    assert out.with_name("tidied").exists()


def test_stages_that_come_keep_a_long_job_alive(out):
    assert run_watched(jobs.floods, 1, out=out, stall_s=60) == 2


@pytest.mark.parametrize(
    ("job", "what", "why"),
    [
        (jobs.is_killed, "the system killed the exporter in `eating memory`", "memory ran out"),
        (jobs.crashes, "the exporter crashed in `dividing by zero in C++`", "SIGSEGV"),
        (
            jobs.reads_a_file_that_is_shortened,
            "the exporter crashed in `reading weights`",
            "shortened",
        ),
        (jobs.has_a_defect, "whisperport failed with an unexpected error", "KeyError: 'nothing'"),
        (jobs.returns_what_cannot_be_sent, "whisperport failed with an unexpected error", "lambda"),
    ],
)
def test_every_end_is_reported_with_the_log(out, job, what, why):
    with pytest.raises(LoweringError) as failed:
        run_watched(job, out=out)

    assert what in failed.value.what
    assert why in failed.value.why
    assert failed.value.hint.endswith(f"the complete log is in {out}.log")
    assert out.with_name("bundle.log").stat().st_size


@pytest.mark.parametrize(
    ("job", "error", "hint"),
    [
        (jobs.is_rejected, UsageError, "known: onnxruntime"),
        (jobs.lacks_a_package, MissingPackageError, "pip install it"),
    ],
)
def test_what_says_all_by_itself_leaves_no_log(out, job, error, hint):
    with pytest.raises(error) as rejected:
        run_watched(job, out=out)

    assert rejected.value.hint == hint
    assert not out.with_name("bundle.log").exists()


def test_a_full_disk_is_no_defect(out):
    with pytest.raises(WhisperportError) as failed:
        run_watched(jobs.finds_the_disk_full, out=out)

    assert "defect" not in str(failed.value)
    assert "No space left" in failed.value.why
    assert "TMPDIR" in failed.value.hint  # in which exporters write temporary files


def test_an_interrupt_of_the_child_is_one_of_the_parent(out):
    with pytest.raises(KeyboardInterrupt):
        run_watched(jobs.is_interrupted, out=out)


PARENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where the tests run in the background
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import watched_jobs
from whisperport.apps.cli.watchdog import run_watched

if __name__ == "__main__":
    run_watched(watched_jobs.waits, sys.argv[2], out=Path(sys.argv[2]))
"""


@contextmanager
def parent_of_a_job(tmp_path):
    """Yield a process whose job waits, and that job's number; `child` is a file that the job has made."""
    script, mark = tmp_path / "parent.py", tmp_path / "child"
    script.write_text(PARENT)
    command = [sys.executable, script, Path(__file__).parent, mark]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as parent:
        wait_until(lambda: mark.exists() and mark.read_text())
        yield parent, int(mark.read_text())


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_child_does_not_outlive_its_parent(tmp_path, how):
    with parent_of_a_job(tmp_path) as (parent, child):
        parent.send_signal(how)
        parent.wait(60)

    # then: it is gone, and has tidied up
    wait_until(lambda: not is_running(child))
    assert not (tmp_path / "child").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parent.py", "tmp"]


def test_nothing_is_left_of_the_log_if_both_are_killed(tmp_path):
    with parent_of_a_job(tmp_path) as (parent, child):
        parent.send_signal(signal.SIGSTOP)  # so that it does not see the other end
        os.kill(child, signal.SIGKILL)
        parent.kill()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["child", "parent.py", "tmp"]


def test_a_log_for_which_there_is_no_room_is_not_written_in_half(out, monkeypatch):
    def copies_half(source, file):
        file.write(source.read(5))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(watchdog.shutil, "copyfileobj", copies_half)
    with pytest.raises(LoweringError) as failed:
        run_watched(jobs.fails_with_400_lines, out=out)

    assert not failed.value.hint
    assert not out.with_name("bundle.log").exists()


def test_a_child_that_cannot_be_started_leaves_no_log(tmp_path, monkeypatch):
    monkeypatch.setattr("whisperport.system.child.get_executable", lambda: str(tmp_path / "gone"))

    with pytest.raises(FileNotFoundError):
        run_watched(jobs.floods, 1, out=tmp_path / "bundle")


SLOW = """
import pathlib, sys, time

def job(mark, say):
    pass

if sys.argv[0] == "-c":
    pathlib.Path(__file__).with_name("importing").touch()
    time.sleep(600)
"""
IMPATIENT = """
import signal
from pathlib import Path
import slow
from whisperport.apps.cli.watchdog import run_watched

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run_watched(slow.job, "x", out=Path("x"))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def test_ctrl_c_while_the_child_still_imports_shows_nothing_of_it(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "parent.py").write_text(IMPATIENT)
    parent = subprocess.Popen(
        [sys.executable, "parent.py"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until((tmp_path / "importing").exists)

    # when: a terminal sends it to both
    os.killpg(parent.pid, signal.SIGINT)
    output = parent.communicate(timeout=60)

    assert output == ("interrupted\n", "")


def wait_until(happened, seconds=60):
    """Waits for what must happen; long, because the machine may be busy."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
