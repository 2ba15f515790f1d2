"""An audio file of an archive that is to be transcribed."""

import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path

# Bytes per second of audio, roughly, by suffix. Only the order of the work and the time left depend on it.
_BYTES_PER_S = {".wav": 32_000, ".w64": 32_000, ".aiff": 32_000, ".flac": 18_000, ".opus": 4_000}
_COMPRESSED = 12_000  # all others
# The year 2262, the last time that the column of the rows holds. A wrong clock writes later ones.
_LATEST_NS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Job:
    """An audio file to transcribe.

    Attributes:
        id: names the file in the archive; unique.
        path: of the file; absolute once `with_state` has returned it.
        language: code or name; None: that of the options.
        prompt: initial prompt; None: that of the options.
        phrases: to prefer, with commas between them; None: those of the options.
        duration_s: as the manifest states it, for the order of the work; None: not stated.
        size: bytes of the file; -1: there is no such regular file.
        modified_ns: time of its last change in nanoseconds, or the nearest that 64 bits hold; 0: there is
            no such regular file.
    """

    id: str
    path: str
    language: str | None = None
    prompt: str | None = None
    phrases: str | None = None
    duration_s: float | None = None
    size: int = -1
    modified_ns: int = 0

    @property
    def estimated_s(self) -> float:
        """Duration in seconds, as stated or guessed from the size; 1 or more."""
        if self.duration_s is not None:
            return max(1.0, self.duration_s)
        return max(1.0, self.size / _BYTES_PER_S.get(Path(self.path).suffix.lower(), _COMPRESSED))


def with_state(job: Job) -> Job:
    """Return the job with the absolute path of its file, its size and the time of its last change."""
    job = replace(job, path=str(Path(job.path).absolute()))
    try:
        status = os.stat(job.path)
    except (OSError, ValueError):  # ValueError: a zero byte in the path
        return job
    if not stat.S_ISREG(status.st_mode):
        return job
    modified_ns = max(-_LATEST_NS, min(status.st_mtime_ns, _LATEST_NS))
    return replace(job, size=status.st_size, modified_ns=modified_ns)


def stored(text: str) -> str:
    """Return a text as valid UTF-8: bytes of a file name that are not UTF-8 become visible escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
