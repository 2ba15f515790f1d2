"""`whisperport archive`"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from whisperport.apps.archive import (
    ArchiveOptions,
    ArchiveProgress,
    ArchiveSummary,
    transcribe_archive,
)
from whisperport.apps.archive.rows import CODES
from whisperport.apps.archive.summary import ArchiveProgressCallback
from whisperport.apps.cli.console import print_json, print_lines, print_note, shows_progress, stderr
from whisperport.apps.cli.fields import field_options, field_values
from whisperport.apps.cli.given import Given
from whisperport.apps.cli.model_option import chosen_bundle, model_options
from whisperport.apps.cli.shared_options import (
    RUN_OPTIONS,
    adapter_option,
    as_json,
    output_option,
    run_option,
    run_options_of,
    short_windows,
    threads,
    trust,
)
from whisperport.apps.cli.transcribe_options import (
    WORDS,
    audio_options,
    decoding_options,
    punctuation_options,
    transcribe_options,
    vad_options,
    with_speech_chunks,
)
from whisperport.apps.cli.verb import Verb, option
from whisperport.system.progress import remaining_text
from whisperport.transcription import TranscribeOptions

NOTE_S = 60.0  # between two lines of progress, if standard error is no terminal


@click.command(
    cls=Verb,
    short_help="Transcribe a large collection of audio files, each once.",
    target_options=RUN_OPTIONS,
)
@click.argument("source", metavar="INPUT", type=Given("collection", as_text=True, exists=True))
@model_options
@audio_options
@vad_options
@output_option(
    "DIR",
    "folder",
    "Folder for the rows (parts/*.parquet), summary.json and report.html: a new or empty one, or that of "
    "an earlier run",
)
@field_options(ArchiveOptions, "retry_failed", "subtitles", "save_every", group="Output")
@as_json
@field_options(ArchiveOptions, "word_timestamps", group=WORDS)
@punctuation_options
@decoding_options
@field_options(ArchiveOptions, "workers", group="Runtime")
@option(
    "--ray",
    group="Runtime",
    is_flag=False,
    flag_value="auto",
    metavar="[ADDRESS]",
    help="Transcribe on a Ray cluster; without ADDRESS, on that of RAY_ADDRESS or of this machine. Every "
    "node needs the bundle and the audio files under the same paths",
)
@field_options(TranscribeOptions, "batch", group="Runtime")
@threads
@run_option
@short_windows
@adapter_option
@trust
def archive(
    source: str,
    out: Path,
    bundle: Path | None,
    model: str | None,
    ray: str | None,
    threads: int | None,
    run_options: tuple[str, ...],
    short_windows: bool | None,
    trust: bool,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Transcribe a large collection of audio files, each once, and write a row about each to Parquet files.

    INPUT is a folder, a manifest (.parquet, .csv, .jsonl) with the column path, and optionally id,
    language, prompt and duration, or a .txt file with one path per line. If the command ends early, repeat
    it: finished files are skipped. A file that cannot be transcribed has a row with its error.

    \b
    Examples:
      $ whisperport archive talks --model tiny.en --out build/archive
      $ whisperport archive talks --model tiny.en --out build/archive --retry-failed
      $ whisperport archive list.csv --bundle build/small --out build/archive --subtitles srt --ray
    """
    options = ArchiveOptions(ray=ray, **field_values(ArchiveOptions, chosen))
    run = run_options_of(
        threads, run_options, trust=trust, short_windows=short_windows, adapter=chosen["adapter"]
    )
    values = {name: value for name, value in chosen.items() if name != "workers"}
    transcribe = with_speech_chunks(transcribe_options(values, run), chosen)
    opened = chosen_bundle(bundle, model)
    with _progress() as progress:
        summary = transcribe_archive(source, out, opened, options, transcribe, progress=progress)
    if as_json:
        print_json({**asdict(summary), "speed": summary.speed})
    else:
        _print(summary, out)
    if summary.failed:
        sys.exit(1)


@contextmanager
def _progress() -> Iterator[ArchiveProgressCallback]:
    """Show the progress on stderr: a bar, or a line a minute if it is no terminal."""
    if not shows_progress():
        yield _Notes()
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda now: bar.update(
            task, description=_words(now), completed=now.finished, total=now.files
        )


class _Notes:
    """Prints the progress as a line from time to time."""

    def __init__(self) -> None:
        self._next = time.monotonic() + NOTE_S

    def __call__(self, now: ArchiveProgress) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + NOTE_S
            print_note(f"{now.finished} of {now.files} files, {_words(now)}")


def _words(now: ArchiveProgress) -> str:
    speed = now.audio_s / now.elapsed_s if now.elapsed_s else 0.0
    parts = (
        f"{now.audio_s / 3600:.2f} h of audio",
        f"{speed:.1f} times real time",
        f"{now.failed} failed" if now.failed else "",
        remaining_text(now.remaining_s),
    )
    return ", ".join(part for part in parts if part)


def _print(summary: ArchiveSummary, out: Path) -> None:
    print_lines(
        f"{out}: {summary.files} files, {summary.audio_s / 3600:.2f} hours of audio, "
        f"{summary.failed} failed",
        f"this run: {summary.run_files} files in {summary.run_seconds:.0f} s, "
        f"{summary.speed:.1f} times as fast as real time",
    )
    for code, count in summary.errors.items():
        print_lines(f"{count:6}  {code}: {CODES.get(code, '')}")
    print_note(f"the report is {out / 'report.html'}")
