"""What the transcription of an archive tells about its progress."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from whisperport.apps.archive.job import Job
from whisperport.apps.archive.rows import Row
from whisperport.system.progress import Remaining


@dataclass(frozen=True, slots=True)
class ArchiveProgress:
    """The state of a run, after each file.

    Attributes:
        files: number of files that this run transcribes.
        finished: of these, how many have a row now.
        failed: of these rows, how many have an error.
        audio_s: seconds of audio in the rows.
        elapsed_s: seconds since the run began.
        remaining_s: estimated seconds left; None: not known yet.
    """

    files: int
    finished: int
    failed: int
    audio_s: float
    elapsed_s: float
    remaining_s: float | None


ArchiveProgressCallback = Callable[[ArchiveProgress], None]


class Meter:
    """Counts the rows of a run. The time left follows from the estimated duration of each file."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._estimated = {job.id: job.estimated_s for job in jobs}
        self._total, self._estimate_done = sum(self._estimated.values()), 0.0
        self._started = time.monotonic()
        self._remaining = Remaining()
        self._remaining.report(0.0, self._total)
        self._done, self._failed, self._audio_s = 0, 0, 0.0

    def count(self, row: Row) -> None:
        """Count a row that a worker returned."""
        self._done += 1
        self._failed += row["error"] is not None
        self._audio_s += row["duration"] or 0.0
        self._estimate_done += self._estimated[row["id"]]
        self._remaining.report(self._estimate_done, self._total)

    def now(self) -> ArchiveProgress:
        """Return the state of the run."""
        return ArchiveProgress(
            len(self._estimated),
            self._done,
            self._failed,
            self._audio_s,
            time.monotonic() - self._started,
            self._remaining.seconds(),
        )
