"""Compare the files of an archive with its rows: which are to be transcribed, and which rows are old.

A file with the path, the size and the time of the last change that its row states is taken as unchanged, as
by `make` and `rsync`. For every other one, its content decides, by SHA-256. So a collection that was moved,
copied or linked keeps its rows, and another file never gets the row of one that has the same id.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from whisperport.apps.archive.identity import options_for, options_sha256
from whisperport.apps.archive.job import Job, stored
from whisperport.apps.archive.store import Finished
from whisperport.errors import UsageError
from whisperport.program.bundle.folder import file_sha256
from whisperport.transcription import TranscribeOptions


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is to be done.

    Attributes:
        waiting: files to transcribe, in order.
        old: rows of other content or options, by id; to be deleted before their files are transcribed.
        seen: id -> new `path`, `size` and `modified_ns` of rows that are right.
    """

    waiting: list[Job]
    old: dict[str, Finished]
    seen: dict[str, dict[str, Any]]


def compared(
    jobs: Sequence[Job],
    rows: dict[str, Finished],
    options: TranscribeOptions,
    *,
    retry_failed: bool,
) -> Comparison:
    """Compare files with rows. Nothing is changed.

    Args:
        jobs: files.
        rows: by id.
        options: of all files.
        retry_failed: whether a row with an error is old.

    Raises:
        UsageError: an id has the row of another file.
    """
    comparison = Comparison([], {}, {})
    for job in jobs:
        if (row := rows.get(job.id)) is None:
            comparison.waiting.append(job)
            continue
        verdict = _verdict(row, job, options, retry_failed)
        if verdict == "old":
            comparison.waiting.append(job)
            comparison.old[job.id] = row
        elif verdict == "moved":
            place = {"path": stored(job.path), "size": job.size, "modified_ns": job.modified_ns}
            comparison.seen[job.id] = place
    return comparison


def own_options_sha256(job: Job, options: TranscribeOptions) -> str:
    """Return the SHA-256 of the options of one file."""
    return options_sha256(options_for(job, options))


def _verdict(
    row: Finished, job: Job, options: TranscribeOptions, retry_failed: bool
) -> Literal["current", "moved", "old"]:
    is_unchanged = _is_unchanged(row, job)
    if row.audio_sha256 is None:  # it could not be read, so nothing can be lost
        return "old" if retry_failed or not is_unchanged else "current"
    if not _is_there(job):  # a row outlives its file
        return "current"
    if retry_failed and row.failed:
        return "old"
    digest = row.audio_sha256 if is_unchanged else _sha256(job)
    if not digest:
        return "current"
    if digest != row.audio_sha256:
        if stored(job.path) != row.path:
            _other_file(row, job)
        return "old"
    if row.options_sha256 != own_options_sha256(job, options):
        return "old"
    return "current" if is_unchanged else "moved"


def _is_unchanged(row: Finished, job: Job) -> bool:
    place = (stored(job.path), job.size, job.modified_ns)
    return place == (row.path, row.size, row.modified_ns)


def _is_there(job: Job) -> bool:
    return job.size >= 0 and os.access(job.path, os.R_OK)


def _sha256(job: Job) -> str:
    """Return the hash of the content; empty if it cannot be read any more."""
    try:
        return file_sha256(Path(job.path))
    except OSError:
        return ""


def _other_file(row: Finished, job: Job) -> NoReturn:
    raise UsageError(
        f"`{job.id}` is the id of two files: `{row.path}` and `{stored(job.path)}`",
        why="the output has the row of the first, and the content of the second is another one",
        hint="choose another `--out` for another collection, or give each file an id of its own: the "
        "column `id` of a manifest",
    )
