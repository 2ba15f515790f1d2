"""Whether processes that tests start end."""

import time
from pathlib import Path


def has_ended(pid: int, within_s: float = 20.0) -> bool:
    """Whether a process ends within a time limit; a zombie process has ended."""
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
