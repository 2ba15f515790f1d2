"""Transcribe an archive: every file once, whatever ended the run before; and the options of that."""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from whisperport.apps.archive.current import compared, own_options_sha256
from whisperport.apps.archive.dispatch import Workers, dispatch
from whisperport.apps.archive.identity import Identity, identity_of, options_for
from whisperport.apps.archive.job import Job
from whisperport.apps.archive.manifest import ArchiveSource, read_source
from whisperport.apps.archive.output_folder import RECORD, check_folder
from whisperport.apps.archive.processes import Processes
from whisperport.apps.archive.report import REPORTED, write_report
from whisperport.apps.archive.rows import with_identity
from whisperport.apps.archive.store import Store
from whisperport.apps.archive.subtitle_files import delete_subtitles, write_subtitles
from whisperport.apps.archive.summary import (
    ArchiveProgressCallback,
    ArchiveSummary,
    Meter,
    summarize,
)
from whisperport.build.export.bundle_cache import open_bundle
from whisperport.errors import UsageError, WhisperportError
from whisperport.program.bundle import Bundle
from whisperport.program.generation import Generation
from whisperport.runtime.decoding.decode import check_language
from whisperport.system.locking import lock_path, locked
from whisperport.system.machine import usable_cores
from whisperport.system.option import Option, check_ranges
from whisperport.system.outputs import is_inside
from whisperport.targets.preflight import available_memory
from whisperport.transcription import TranscribeOptions

MAX_WORKERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveOptions:
    """How an archive is transcribed. The help text of every option is beside its field.

    Attributes:
        word_timestamps: replaces that of `TranscribeOptions`, whose default is another one.
        ray: address of a Ray cluster, such as "auto"; None: worker processes on this machine.

    Raises:
        UsageError: a value is out of its range.
    """

    workers: Annotated[
        int | None,
        Option(
            "Number of processes that transcribe, each with the bundle in its memory. On a Ray cluster, "
            "the largest number of actors",
            1,
            MAX_WORKERS,
            default="one per core, fewer if memory is short; on a cluster, as many as its cores allow",
        ),
    ] = None
    retry_failed: Annotated[
        bool, Option("Transcribe the files again whose rows in --out have an error")
    ] = False
    word_timestamps: Annotated[
        bool,
        Option(
            "Compute the start and end of every word. Without them, adding words later means transcribing "
            "all files again"
        ),
    ] = True
    subtitles: Annotated[
        Literal["srt", "vtt"] | None,
        Option("Also write a subtitle file of this format for each transcript"),
    ] = None
    save_every: Annotated[
        float,
        Option(
            "Seconds between two writes of finished rows: what is lost at most if the process ends early",
            0,
            3600,
            metavar="SECONDS",
        ),
    ] = 30.0
    ray: str | None = None

    def __post_init__(self) -> None:
        check_ranges(self)


log = logging.getLogger(__name__)

# Memory of a worker: an estimate. One with the embedded model has 0.28 GB; larger were not measured.
WORKER_BYTES, WORKER_FACTOR = 300e6, 1.5


def transcribe_archive(
    source: ArchiveSource,
    out: str | os.PathLike[str],
    bundle: Bundle | str | os.PathLike[str] | None = None,
    options: ArchiveOptions | None = None,
    transcribe: TranscribeOptions | None = None,
    *,
    progress: ArchiveProgressCallback = lambda _: None,
) -> ArchiveSummary:
    """Transcribe every file of an archive once, and write a row about each to Parquet files.

    Files that have a row in `out` are skipped, whatever ended the run that wrote it. A file that cannot be
    transcribed has a row with its error, and costs no other file. The text and times of a row are those of
    `transcribe`; see `transcribe_files` about log-probabilities.

    Args:
        source: a folder; a manifest (.parquet, .csv, .jsonl) with the column `path`, and optionally `id`,
            `language`, `prompt`, `phrases` (with commas between them) and `duration` (seconds); a .txt file
            with one path per line; or paths.
        out: folder for the rows (`parts/*.parquet`), `summary.json` and `report.html`.
        bundle: a bundle or the name of a model: see `Transcriber`.
        options: how the archive is worked through; None: defaults.
        transcribe: transcription options of every file; None: defaults. Its `workers` and
            `word_timestamps` are not used: `options` has its own.
        progress: called after every file.

    Returns:
        What is in `out` at the end, and what this run did.

    Raises:
        UsageError: the source cannot be read or has an id twice; `out` has files and is no archive, or has
            rows of another bundle or other options; another process writes to it; or a transcript would be
            replaced because the manifest names another language, which the model lacks.
        BundleError: the bundle is damaged or missing.
        MissingPackageError: pyarrow, or for a cluster Ray, is not installed.
        WhisperportError: `out` cannot be written. Rows that were saved before are kept.
        KeyboardInterrupt: Ctrl-C was pressed; finished rows were saved before.
    """
    options, transcribe = options or ArchiveOptions(), transcribe or TranscribeOptions()
    transcribe = replace(transcribe, word_timestamps=options.word_timestamps)
    folder = Path(out)
    if isinstance(source, str | os.PathLike) and is_inside(source, folder):
        raise UsageError(
            f"the input `{os.fspath(source)}` is in the folder `{folder}` that is written",
            why="files there are merged and deleted",
            hint="copy the input to another folder, or choose another output",
        )
    with _writing(folder):
        check_folder(folder)
    jobs, opened = read_source(source), open_bundle(bundle)
    check_language(opened.manifest.generation, transcribe.decode)
    identity = identity_of(opened, transcribe)
    with _only_writer(folder):
        store = Store(folder, identity, options.save_every)
        waiting = _waiting(jobs, store, transcribe, options, opened.manifest.generation)
        started = time.monotonic()
        _transcribe(waiting, store, opened.folder, options, transcribe, identity, progress)
        seconds = time.monotonic() - started
        check_folder(folder)  # again, here and below: the user may have put a file or a link there
        store.merge()
        summary = summarize(store.rows(_SUMMARIZED), identity, waiting, seconds)
        if options.subtitles:
            check_folder(folder)
            kept = write_subtitles(store.rows(("id", "segments")), folder, options.subtitles)
            _warn_of_kept(kept)
        write_report(store.rows(REPORTED), folder, summary)
    return summary


_SUMMARIZED = ("id", "duration", "language", "marks", "error")


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Hold the lock of the output, which is made if it does not exist."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(lock_path(folder / RECORD)) as lock:
            if lock is None:
                raise UsageError(
                    f"another process writes to `{folder}`",
                    why="it holds the lock of this folder",
                    hint="wait for it; finished files are skipped, so the command can be repeated",
                )
            check_folder(folder)  # again: exporting a model takes minutes
            yield


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WhisperportError(
            f"cannot write to `{folder}`",
            why=error.strerror or str(error),
            hint="check the permissions and the free space; rows that were saved are kept",
        ) from error


def _warn_of_kept(subtitles: Sequence[Path]) -> None:
    if subtitles:
        log.warning(
            "%d subtitle files differ from their rows and were kept, such as %s: delete them, and repeat "
            "the command, to have them written again",
            len(subtitles),
            subtitles[0],
        )


def _waiting(
    jobs: Sequence[Job],
    store: Store,
    transcribe: TranscribeOptions,
    options: ArchiveOptions,
    generation: Generation,
) -> list[Job]:
    """Return the files to transcribe; rows that are not current any more are deleted.

    Raises:
        UsageError: a row with a transcript would be deleted for a language that the model lacks.
    """
    comparison = compared(jobs, store.finished(), transcribe, retry_failed=options.retry_failed)
    for job in comparison.waiting:
        row = comparison.old.get(job.id)
        if row and not row.failed:
            _check_language_of(job, transcribe, generation)
    delete_subtitles(store.rows(("id", "segments"), comparison.old), store.folder)
    store.change(comparison.old, comparison.seen)
    return comparison.waiting


def _check_language_of(job: Job, transcribe: TranscribeOptions, generation: Generation) -> None:
    try:
        check_language(generation, options_for(job, transcribe).decode)
    except UsageError as error:
        raise UsageError(
            f"the transcript of `{job.id}` would be replaced by an error",
            why=error.what,
            hint="correct the column `language` of the manifest; nothing was changed",
        ) from error


def _transcribe(
    jobs: Sequence[Job],
    store: Store,
    bundle: Path,
    options: ArchiveOptions,
    transcribe: TranscribeOptions,
    identity: Identity,
    progress: ArchiveProgressCallback,
) -> None:
    """Transcribe files, and save their rows, also if this is interrupted."""
    by_id, meter = {job.id: job for job in jobs}, Meter(jobs)
    with closing(_workers(len(jobs), bundle, options, transcribe)) as workers:
        try:
            for row in dispatch(jobs, workers):
                own = own_options_sha256(by_id[row["id"]], transcribe)
                store.add(with_identity(row, identity, own))
                meter.count(row)
                progress(meter.now())
        finally:
            store.save()


def _workers(
    files: int, bundle: Path, options: ArchiveOptions, transcribe: TranscribeOptions
) -> Workers:
    if options.ray is not None:
        from whisperport.apps.archive.cluster import Actors

        return Actors(options.ray, options.workers, bundle, transcribe)
    count = min(files, options.workers or default_workers(bundle))
    threads = transcribe.run.threads or max(1, usable_cores() // max(1, count))
    run = replace(transcribe.run, threads=threads)
    return Processes(count, bundle, replace(transcribe, workers=1, run=run))


def default_workers(bundle: Path) -> int:
    """Return one worker per core, or fewer if their memory is not there; at least one."""
    available = available_memory()
    if available is None:
        return usable_cores()
    size = sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())
    needed = WORKER_BYTES + WORKER_FACTOR * size
    return max(1, min(usable_cores(), int(available / needed)))
