"""What the transcription of an archive tells: its progress after each file, and what is in the output."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from whisperport.apps.archive.identity import Identity
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSummary:
    """What is in the output of an archive, and what the last run did.

    Attributes:
        model: name in the bundle's manifest.
        files: number of rows.
        failed: of these, how many have an error.
        audio_s: seconds of audio in the rows.
        languages: code -> number of rows, the most frequent first.
        errors: code -> number of rows, the most frequent first; see `archive.rows.CODES`.
        marks: what is doubtful -> number of rows, the most frequent first; see `archive.rows.MARKS`.
        run_files: number of files that the last run transcribed; all others were finished before.
        run_seconds: wall-clock seconds of it, loading included.
        run_audio_s: seconds of audio of it, as far as known.
        bundle_sha256: of the bundle's manifest.
        options_sha256: of the options that can change a transcript.
        versions: package -> version, of the last run.
    """

    model: str
    files: int
    failed: int
    audio_s: float
    languages: dict[str, int]
    errors: dict[str, int]
    marks: dict[str, int]
    run_files: int
    run_seconds: float
    run_audio_s: float
    bundle_sha256: str
    options_sha256: str
    versions: dict[str, str]

    @property
    def speed(self) -> float:
        """Seconds of audio that the last run transcribed per second; 0 if it transcribed none."""
        return self.run_audio_s / self.run_seconds if self.run_audio_s else 0.0


def summarize(
    rows: Iterable[Row], identity: Identity, run: Sequence[Job], run_seconds: float
) -> ArchiveSummary:
    """Count the rows.

    Args:
        rows: with the columns `id`, `duration`, `language`, `marks` and `error`.
        identity: of the bundle and the options of all rows.
        run: files of the last run.
        run_seconds: wall-clock seconds of the last run.
    """
    languages, errors, marks = Counter[str](), Counter[str](), Counter[str]()
    files, audio_s, run_audio_s, run_ids = 0, 0.0, 0.0, {job.id for job in run}
    for row in rows:
        files += 1
        audio_s += row["duration"] or 0.0
        run_audio_s += (row["duration"] or 0.0) * (row["id"] in run_ids)
        languages.update([row["language"]] if row["language"] else [])
        marks.update(row["marks"])
        errors.update([row["error"]["code"]] if row["error"] else [])
    return ArchiveSummary(
        model=identity.model,
        files=files,
        failed=errors.total(),
        audio_s=audio_s,
        languages=dict(languages.most_common()),
        errors=dict(errors.most_common()),
        marks=dict(marks.most_common()),
        run_files=len(run),
        run_seconds=run_seconds,
        run_audio_s=run_audio_s,
        bundle_sha256=identity.bundle_sha256,
        options_sha256=identity.options_sha256,
        versions=identity.versions,
    )
