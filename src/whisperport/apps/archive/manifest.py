"""Read what is to be transcribed: a folder, a list of paths, or a manifest (Parquet, CSV, JSON lines)."""

import csv
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TextIO

from whisperport.apps.archive.job import Job, stored, with_state
from whisperport.apps.archive.parquet_manifest import COLUMNS, read_parquet
from whisperport.errors import UsageError
from whisperport.speech.audio.load import AUDIO_SUFFIXES
from whisperport.system.regular_file import other_kind

ArchiveSource = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

MAX_LINE = 2**20  # characters of a line of a manifest


def read_source(source: ArchiveSource) -> list[Job]:
    """Return a job for each file of an archive, the longest first.

    Args:
        source: a folder, whose audio and video files are used, also those of its subfolders; a manifest
            with the suffix .parquet, .csv or .jsonl; a text file with one path per line; or paths.

    Raises:
        UsageError: the source is missing, unreadable, empty, of another form, or has an id twice.
    """
    jobs = [with_state(job) for job in _jobs(source)]
    if not jobs:
        raise UsageError(
            "there is nothing to transcribe",
            why="the source names no audio file",
            hint=f"the suffixes of files in a folder may be {', '.join(sorted(AUDIO_SUFFIXES))}",
        )
    _check_ids(jobs)
    return sorted(jobs, key=lambda job: -job.estimated_s)


def _jobs(source: ArchiveSource) -> Iterator[Job]:
    if not isinstance(source, str | os.PathLike):
        yield from (_of_path(os.fspath(path)) for path in source)
        return
    path = Path(source)
    try:
        if (kind := other_kind(path)) not in ("", "a folder"):
            _wrong(path, f"it is {kind}")
        if path.is_dir():
            yield from _in_folder(path)
        elif read := _READERS.get(path.suffix.lower()):
            yield from _of_rows(read(path), path)
        else:
            _wrong(path, "it is neither a folder nor a .parquet, .csv, .jsonl or .txt file")
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, CSV, JSON or Parquet
        raise UsageError(
            f"cannot read `{source}`",
            why=getattr(error, "strerror", None) or str(error),
            hint="check the path, the permissions and the format",
        ) from error


def _of_path(path: str) -> Job:
    return Job(stored(path), path)


def _in_folder(folder: Path) -> Iterator[Job]:
    """Yield the audio files of a folder. Links to folders are not followed, so that there is no loop."""
    for parent, _, names in os.walk(folder, onerror=_reraise):
        for name in names:
            if Path(name).suffix.lower() in AUDIO_SUFFIXES:
                path = Path(parent, name)
                yield Job(stored(path.relative_to(folder).as_posix()), str(path))


def _reraise(error: OSError) -> NoReturn:
    raise error


def _of_rows(rows: Iterable[Mapping[str, Any]], manifest: Path) -> Iterator[Job]:
    """Yield the job of each row. A relative path begins in the folder of the manifest."""
    for number, row in enumerate(rows, start=1):
        path = _text(row, "path", number, manifest)
        if not path:
            _wrong(manifest, f"row {number} has no `path`; its columns: {', '.join(map(str, row))}")
        yield Job(
            stored(_text(row, "id", number, manifest) or path),
            str(manifest.parent / path),
            _text(row, "language", number, manifest) or None,
            _text(row, "prompt", number, manifest) or None,
            _text(row, "phrases", number, manifest) or None,
            _seconds(row.get("duration"), number, manifest),
        )


def _text(row: Mapping[str, Any], column: str, number: int, manifest: Path) -> str:
    value = row.get(column)
    if column == "id" and isinstance(value, int):
        value = str(value)
    if value is not None and not isinstance(value, str):
        _wrong(manifest, f"`{column}` of row {number} is {value!r:.50}; expected text")
    return value or ""


def _seconds(value: Any, number: int, manifest: Path) -> float | None:
    if value in (None, ""):
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):  # OverflowError: an integer above 1e308
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        _wrong(manifest, f"`duration` of row {number} is {value!r:.50}; expected seconds")
    return seconds


def _from_parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    return read_parquet(path, MAX_LINE)


def _from_csv(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            yield from csv.DictReader(_limited(file, path), strict=True)
        except csv.Error as error:
            raise ValueError(str(error)) from error


def _from_json_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    for line in _lines(path):
        row = json.loads(line)
        if not isinstance(row, dict):
            _wrong(path, f"a line is {line:.50}; expected an object with `path`")
        yield row


def _from_list(path: Path) -> Iterator[Mapping[str, Any]]:
    return ({"path": line} for line in _lines(path))


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines that are not empty."""
    with path.open(encoding="utf-8-sig") as file:
        for line in _limited(file, path):
            if line.strip():
                yield line.rstrip("\r\n")


def _limited(file: TextIO, path: Path) -> Iterator[str]:
    """Yield all lines; one that is too long is an error before it is in memory."""
    while line := file.readline(MAX_LINE):
        if len(line) == MAX_LINE:
            _wrong(path, f"a line has {MAX_LINE} characters or more")
        yield line


_READERS = {
    ".parquet": _from_parquet,
    ".csv": _from_csv,
    ".jsonl": _from_json_lines,
    ".ndjson": _from_json_lines,
    ".txt": _from_list,
}


def _check_ids(jobs: list[Job]) -> None:
    double = [id for id, count in Counter(job.id for job in jobs).items() if count > 1]
    if double:
        raise UsageError(
            f"{len(double)} ids occur more than once, such as `{double[0]}`",
            why="the id names the row of a file, and each file has one row",
            hint="give each file an id of its own; without the column `id`, the path is the id",
        )


def _wrong(path: Path, why: str) -> NoReturn:
    raise UsageError(
        f"`{path}` is not a source of audio files",
        why=why,
        hint="give a folder, a .txt file with one path per line, or a manifest with the columns "
        f"{', '.join(COLUMNS)}, of which only `path` is required",
    )
