"""Small jobs that behave like hostile programs; a limited process imports them by name."""

import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

from whisperport.errors import MissingPackageError


def gives_back(progress: Any, **arguments: Any) -> Any:
    progress("giving back")
    print("printed by Python")
    os.write(2, b"printed by a library\n")
    return {**arguments, "stdin": sys.stdin.read()}


def never_ends(progress: Any, pid_file: str) -> None:
    Path(pid_file).write_text(str(os.getpid()))
    progress("looping")
    while True:
        time.sleep(0.01)


def asks_for(progress: Any, size: int) -> int:
    progress("asking")
    return len(bytearray(size))


def grows_in_shared_memory(progress: Any, step: int) -> None:
    """Memory that the kernel does not count as data."""
    progress("growing")
    kept = []
    while True:
        kept.append(mmap.mmap(-1, step))
        kept[-1].write(b"x" * step)
        time.sleep(0.02)


def aborts(progress: Any) -> None:
    progress("aborting")
    os.abort()


def fails(progress: Any) -> None:
    raise MissingPackageError(
        "there is no runtime", why="it is not installed", hint="pip install x"
    )


def raises(progress: Any) -> None:
    progress("raising")
    raise KeyError("x\ny")
