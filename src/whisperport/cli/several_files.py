"""`whisperport transcribe` of several audio files: one line each, or one file each in a folder."""

import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from whisperport.atomic import write_atomic
from whisperport.bundle import Bundle
from whisperport.cli.console import print_error, print_json, print_note, print_warning, write
from whisperport.cli.verb import option
from whisperport.errors import WhisperportError
from whisperport.text import SubtitleOptions, write_as
from whisperport.text.printable import one_line
from whisperport.transcription import TranscribeOptions, Transcript, transcribe_files

output_folder = option(
    "--output-dir",
    "-o",
    group="Output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder to write the transcript of each audio file to, in place of standard output. Required "
    "for several files in a format other than txt",
)


def check_several(
    audio: tuple[str, ...], output_format: str, folder: Path | None, *, as_json: bool
) -> None:
    """Check how the transcripts of several audio files are written.

    Raises:
        click.UsageError: the format needs a folder, or two transcripts would have the same file.
    """
    if folder is None and output_format != "txt" and not as_json:
        raise click.UsageError(
            f"--output-format {output_format} of several files requires --output-dir"
        )
    if folder is not None and as_json:
        raise click.UsageError(
            "--json and --output-dir exclude each other; use --output-format json"
        )
    names = Counter(_file_name(one, output_format) for one in audio)
    if folder is not None and max(names.values()) > 1:
        name = names.most_common(1)[0][0]
        raise click.UsageError(f"two audio files would have the transcript {one_line(name)}")


def transcribe_several(
    audio: tuple[str, ...],
    bundle: Bundle | Path,
    options: TranscribeOptions,
    subtitles: SubtitleOptions,
    output_format: str,
    folder: Path | None,
    *,
    as_json: bool,
) -> None:
    """Transcribe audio files, and print or write each transcript as soon as it is there.

    A file that cannot be transcribed is reported, and the others are transcribed. The exit status is then
    1.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    failed = False
    for name, outcome in zip(audio, transcribe_files(audio, bundle, options), strict=True):
        if isinstance(outcome, WhisperportError):
            failed = True
            print_note(f"{name} was not transcribed")
            print_error(outcome)
            continue
        for start in outcome.truncated:
            print_warning(
                f"{name}: the window at {start:.0f} s reached the limit of --max-tokens: the end of its "
                "text is missing"
            )
        if as_json:
            found.append({"audio": name, **asdict(outcome)})
        elif folder is not None:
            text = _text(outcome, output_format, subtitles)
            write_atomic(folder / _file_name(name, output_format), text.encode())
        else:
            write(f"{one_line(name)}: {one_line(outcome.text)}\n")
    if as_json:
        print_json(found)
    if failed:
        sys.exit(1)


def _file_name(audio: str, output_format: str) -> str:
    """Return the name of the transcript of an audio file."""
    return f"{Path(audio).stem}.{output_format}"


def _text(transcript: Transcript, output_format: str, subtitles: SubtitleOptions) -> str:
    if output_format == "txt":
        return f"{one_line(transcript.text)}\n"
    language = transcript.language
    return write_as(output_format, transcript.segments, language=language, options=subtitles)
