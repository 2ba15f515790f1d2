"""Small jobs that behave like hostile programs; a limited process imports them by name."""

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from whisperport.errors import MissingPackageError
from whisperport.system.progress import begin_stage


def gives_back(**arguments: Any) -> Any:
    begin_stage("giving back")
    print("printed by Python")
    os.write(2, b"printed by a library\n")
    return {**arguments, "stdin": sys.stdin.read()}


def never_ends(pid_file: str) -> None:
    Path(pid_file).write_text(str(os.getpid()))
    begin_stage("looping")
    while True:
        time.sleep(0.01)


def spins() -> None:
    begin_stage("spinning")
    while True:
        pass


def asks_for(size: int) -> int:
    begin_stage("asking")
    return len(bytearray(size))


def grows_in_shared_memory(step: int) -> None:
    """Memory that the kernel does not count as data."""
    begin_stage("growing")
    kept = []
    while True:
        kept.append(mmap.mmap(-1, step))
        kept[-1].write(b"x" * step)
        time.sleep(0.02)


def aborts() -> None:
    begin_stage("aborting")
    os.abort()


def is_killed() -> None:
    begin_stage("dying")
    os.kill(os.getpid(), signal.SIGKILL)


def fails() -> None:
    raise MissingPackageError(
        "there is no runtime", why="it is not installed", hint="pip install x"
    )


def raises() -> None:
    begin_stage("raising")
    raise KeyError("x\ny")


def opens(path: str) -> None:
    Path(path).read_bytes()


def leaves_a_process() -> None:
    subprocess.Popen(["sleep", "60"], start_new_session=True)


def loaded_modules() -> list[str]:
    return list(sys.modules)
