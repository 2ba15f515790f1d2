"""Read facts about a process and its child processes from `/proc`."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def tree(root: int) -> list[int]:
    """Return `root` and all of its descendants."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, ValueError):
                # The name, in brackets, may contain any character; the parent is the second field after it.
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents[int(entry)] = int(fields[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes, without pages of files such as libraries."""
    with suppress(OSError, ValueError, IndexError):
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(resident) - int(shared)) * PAGE
    return 0


def waited_s(pid: int) -> float:
    """Return the seconds in which a process was ready to run and waited for a CPU core."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def has_ended(pid: int, within_s: float = 20.0) -> bool:
    """Return whether a process ends within a time limit; a zombie process has ended."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def command(pid: int) -> str:
    """Return the command line of a process; empty if the process has ended."""
    with suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode("utf-8", "replace")
        )
    return ""


def kill(pids: list[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to processes."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)
