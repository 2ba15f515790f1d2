"""`whisperport transcribe` of several audio files: one line each, or one file each in a folder."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from whisperport.apps.cli.audio_files import check_audio
from whisperport.apps.cli.console import (
    print_error,
    print_json,
    print_note,
    print_warning,
    shows_progress,
    stderr,
    write,
)
from whisperport.apps.cli.transcript_output import TranscriptFiles, print_mismatches
from whisperport.errors import WhisperportError
from whisperport.program.bundle import Bundle
from whisperport.speech.text import SubtitleOptions, write_as
from whisperport.system.printable import one_line
from whisperport.transcription import TranscribeOptions, Transcript, transcribe_files


def check_several(output_format: str, files: TranscriptFiles | None, *, as_json: bool) -> None:
    """Check how the transcripts of several audio files are written.

    Raises:
        click.UsageError: the format needs a folder, or two options contradict each other.
    """
    if files is None and output_format != "txt" and not as_json:
        raise click.UsageError(
            f"--output-format {output_format} of several files requires --output-dir"
        )
    if files is not None and as_json:
        raise click.UsageError(
            "--json and --output-dir exclude each other; use --output-format json"
        )


def transcribe_several(
    audio: tuple[str, ...],
    opening: Callable[[], Bundle | Path],
    options: TranscribeOptions,
    subtitles: SubtitleOptions,
    output_format: str,
    files: TranscriptFiles | None,
    *,
    as_json: bool,
) -> None:
    """Transcribe audio files, and print or write each transcript as soon as it is there.

    A file that cannot be transcribed, or whose transcript cannot be written, is reported, and the others
    are transcribed. The last lines name what is missing. The exit status is then 1.

    Args:
        opening: returns the bundle, and may export it. It is called if there is audio to transcribe.
    """
    transcripts: list[dict[str, Any]] = []
    failed: list[str] = []
    if files is not None:
        for name, error in files.prepare().items():
            _report(name, error, failed)
    work = [name for name in audio if name not in failed] if files is None else files.writable()
    work = [name for name in work if _is_audio(name, failed)]
    outcomes = transcribe_files(work, opening(), options) if work else ()
    with _progress(len(work)) as progress:
        for name, outcome in zip(work, outcomes, strict=True):
            try:
                if isinstance(outcome, WhisperportError):
                    raise outcome
                _warn_if_truncated(name, outcome)
                print_mismatches(outcome.segments, name)
                if as_json:
                    transcripts.append({"audio": name, **asdict(outcome)})
                elif files is not None:
                    files.write(name, _text(outcome, output_format, subtitles))
                else:
                    progress.stop()  # both may be on one terminal
                    write(f"{one_line(name)}: {one_line(outcome.text)}\n")
                    sys.stdout.flush()
                    progress.start()
            except WhisperportError as error:
                _report(name, error, failed)
            progress.advance(progress.task_ids[0])
    if as_json:
        print_json(transcripts)
    _print_summary(len(audio), failed)
    if failed:
        sys.exit(1)


def _is_audio(name: str, failed: list[str]) -> bool:
    """Return whether a file can be transcribed, as far as is known before; report one that cannot."""
    try:
        check_audio(name)
    except WhisperportError as error:
        _report(name, error, failed)
        return False
    return True


@contextmanager
def _progress(total: int) -> Iterator[Progress]:
    """Show on stderr how many files are done, if progress is shown."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns,
        console=stderr,
        transient=True,
        redirect_stdout=False,  # rich would print it on stderr
        disable=not shows_progress(),
    ) as progress:
        progress.add_task("audio files", total=total)
        yield progress


def _report(name: str, error: WhisperportError, failed: list[str]) -> None:
    failed.append(name)
    print_note(f"{name} was not transcribed")
    print_error(error)


def _warn_if_truncated(name: str, transcript: Transcript) -> None:
    for start in transcript.truncated:
        print_warning(
            f"{name}: the window at {start:.0f} s reached the limit of --max-tokens: the end of its "
            "text is missing"
        )


def _print_summary(n_files: int, failed: list[str]) -> None:
    """Print how many files were transcribed, and the names of the others."""
    n_transcribed = n_files - len(failed)
    print_note(f"{n_transcribed} of {n_files} audio file{'s' * (n_files != 1)} transcribed")
    for name in failed:
        print_note(f"missing: {one_line(name)}")


def _text(transcript: Transcript, output_format: str, subtitles: SubtitleOptions) -> str:
    if output_format == "txt":
        return f"{one_line(transcript.text)}\n"
    language = transcript.language
    return write_as(output_format, transcript.segments, language=language, options=subtitles)
