"""What concerns a process as a whole: the process of an object, forks, and freed memory."""

import ctypes
import gc
import os
import sys
import weakref
from collections.abc import Callable
from weakref import WeakSet

from whisperport.errors import ForkError

SPAWN = 'start that process with the start method `spawn`: multiprocessing.get_context("spawn")'

_kept: WeakSet[object] = WeakSet()


class OwnProcess:
    """The process that created this object."""

    def __init__(self) -> None:
        self._id = os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether the calling code runs in the process that created this object."""
        return os.getpid() == self._id

    def check(self, what: str, hint: str = f"load the bundle in that process, or {SPAWN}") -> None:
        """Raise ForkError if the calling code runs in a fork of the process that created this object.

        Args:
            what: subject of the error message, such as "the program `encoder`".
            hint: hint of the error.
        """
        if os.getpid() != self._id:
            raise ForkError(
                f"{what} cannot be used in a fork of the process that loaded it",
                why="a fork copies the memory of a process but not its threads, so the runtime could wait "
                "permanently for a thread that does not exist",
                hint=hint,
            )


def release_with(owner: object, release: Callable[[], object]) -> None:
    """Call `release` when an object is deleted, in this process and not in its forks.

    Args:
        release: has no reference to the object.
    """
    weakref.finalize(owner, _if_current, OwnProcess(), release)


def _if_current(process: OwnProcess, call: Callable[[], object]) -> None:
    if process.is_current:
        call()


def keep_in_forks(native: object) -> None:
    """Prevent the destruction of this object in forks of this process, even when a fork exits.

    The destructors of ONNX Runtime's sessions wait for threads that do not exist in a fork.
    """
    _kept.add(native)


_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def return_freed_memory() -> None:
    """Free what only circles of references keep, and return freed memory to the operating system.

    torch's graphs are such circles. Memory is returned by glibc alone, which keeps small freed blocks for
    later: after the lowering of Whisper base to XNNPACK, 210 MB.
    """
    gc.collect()
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries do not have it
    if trim is not None:
        trim(0)


def return_large_blocks(size: int = 2**20) -> None:
    """Let glibc return each freed block of at least `size` bytes to the operating system immediately.

    By default its limit grows to 32 MiB, and what is freed in between small blocks stays in the process.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, size)


def _keep_all() -> None:
    for native in list(_kept):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_keep_all)
