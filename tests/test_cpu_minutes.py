"""What `make test` prints at its end."""

import subprocess
import sys
from pathlib import Path

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
