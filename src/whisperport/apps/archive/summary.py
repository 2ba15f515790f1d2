"""What is in the output of an archive, and what the last run did, as numbers."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from whisperport.apps.archive.identity import Identity
from whisperport.apps.archive.job import Job
from whisperport.apps.archive.rows import Row


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
