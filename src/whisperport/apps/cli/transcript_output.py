"""Where transcripts go: standard output, or files, whose names are checked before the work."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from whisperport.apps.cli.console import print_error, print_json, print_note, print_warning, write
from whisperport.apps.cli.paths import OutputPath
from whisperport.apps.cli.verb import option, together
from whisperport.errors import IncompleteError, Interrupted, WhisperportError
from whisperport.speech.text import Segment, SubtitleOptions, write_as
from whisperport.system import interrupts
from whisperport.system.atomic import write_atomic
from whisperport.system.outputs import Output, is_same, reason_against
from whisperport.system.printable import one_line
from whisperport.transcription import Transcript

FORMATS = ("txt", "srt", "vtt", "tsv", "json")

output_options = together(
    option(
        "--output-dir",
        "-o",
        "output",
        group="Output",
        type=OutputPath(None),
        metavar="PATH",
        help="Folder to write the transcript of each audio file to, in place of standard output. For one "
        "audio file also a file, such as talk.srt. Required for several files in a format other than txt",
    ),
    option(
        "--overwrite",
        group="Output",
        is_flag=True,
        help="Replace files in --output-dir that have the name of a transcript to write, such as talk.txt, "
        "whoever wrote them. Without it, the command stops before it transcribes if there is one",
    ),
)


def is_transcript_name(output: Path | None) -> bool:
    """Return whether `--output-dir` is the name of a transcript, such as talk.srt, and not a folder."""
    return output is not None and output.suffix[1:] in FORMATS and not output.is_dir()


def chosen_format(output: Path | None, chosen: str | None) -> str:
    """Return the format of the transcripts: the chosen one, or that of the name of the file.

    Raises:
        click.UsageError: the two contradict each other.
    """
    if output is None or not is_transcript_name(output):
        return chosen or "txt"
    named = output.suffix[1:]
    if chosen not in (None, named):
        raise click.UsageError(
            f"--output-format {chosen} and the file name {one_line(output.name)} contradict each other"
        )
    return named


class TranscriptFiles:
    """The file of the transcript of each audio file.

    Args:
        audio: paths of the audio files.
        output: folder, or for one audio file the name of a transcript.
        output_format: suffix of the names.
        inputs: what else the command reads, such as the bundle.
        overwrite: whether existing files are replaced.

    Raises:
        click.UsageError: several audio files have one transcript, or transcripts exist.
    """

    def __init__(
        self,
        audio: Sequence[str],
        output: Path,
        output_format: str,
        inputs: Sequence[Path] = (),
        *,
        overwrite: bool,
    ) -> None:
        is_file = is_transcript_name(output)
        if is_file and len(audio) > 1:
            raise click.UsageError(
                f"--output-dir {one_line(str(output))} is one file for {len(audio)} audio files; "
                "give a folder"
            )
        if not is_file and output.exists() and not output.is_dir():
            raise click.UsageError(
                f"--output-dir {one_line(str(output))} is a file, and no name of a transcript; give a "
                f"folder, or a name that ends in {', '.join(f'.{suffix}' for suffix in FORMATS)}"
            )
        self._folder = output.parent if is_file else output
        self._inputs: list[str | Path] = [*audio, *inputs]
        self._overwrite = overwrite
        self._files: dict[str, Path] = {}
        self._errors: dict[str, WhisperportError] = {}
        for source in audio:
            path = output if is_file else output / f"{Path(source).stem}.{output_format}"
            self._add(source, path)
        existing = [path for path in self._files.values() if os.path.lexists(path)]
        if existing and not overwrite:
            raise click.UsageError(
                f"{len(existing)} of the transcripts to write exist, such as "
                f"{one_line(str(existing[0]))}; give --overwrite to replace them, or another --output-dir"
            )

    def prepare(self) -> dict[str, WhisperportError]:
        """Make the folder, and return an error for each audio file whose transcript cannot be written.

        Raises:
            WhisperportError: the folder cannot be made.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise WhisperportError(
                f"cannot make the folder `{self._folder}`",
                why=getattr(error, "strerror", None) or str(error),
                hint="choose another folder with --output-dir",
            ) from error
        return self._errors

    def writable(self) -> list[str]:
        """Return the audio files whose transcripts can be written as far as is known, in order."""
        return list(self._files)

    def write(self, audio: str, text: str) -> None:
        """Write the transcript of an audio file.

        Raises:
            WhisperportError: it cannot be written, or another program has made this file meanwhile.
        """
        path = self._files[audio]
        if os.path.lexists(path) and not self._overwrite:
            raise _error(path, "it was made during the transcription", "give --overwrite")
        if reason := _reason_of_link(path):
            raise _error(path, *reason)
        write_atomic(path, text.encode())

    def _add(self, audio: str, path: Path) -> None:
        """Record the file of a transcript, or why it cannot be written."""
        if reason := self._reason(audio, path):
            self._errors[audio] = _error(path, *reason)
        else:
            self._files[audio] = path

    def _reason(self, audio: str, path: Path) -> tuple[str, str] | None:
        """Return why a transcript cannot be written and what to do next, as far as is known before."""
        separate = "rename the audio file, or transcribe it separately with another --output-dir"
        for source, transcript in self._files.items():
            if is_same(path, transcript):
                return f"it is the transcript of `{source}` too", separate
        try:
            path.lstat()
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:  # the name is too long; a zero byte in the name
            return getattr(error, "strerror", None) or str(error), separate
        if reason := _reason_of_link(path):
            return reason
        return reason_against(Output(path, "--output-dir", "transcript"), self._inputs)


def _reason_of_link(path: Path) -> tuple[str, str] | None:
    """A link may lead out of the folder, to a file that nobody named."""
    if path.is_symlink():
        return (
            f"it is a link to `{os.readlink(path)}`",
            "delete the link, or choose another --output-dir",
        )
    return None


def _error(path: Path, why: str, hint: str) -> WhisperportError:
    return WhisperportError(f"cannot write `{path}`", why=why, hint=hint)


transcript_json = option(
    "--json",
    "as_json",
    group="Output",
    is_flag=True,
    help="Print the transcript and all its details as JSON, in place of --output-format",
)


def print_transcript_of(
    job: Callable[[], Transcript],
    subtitles: SubtitleOptions,
    output_format: str,
    *,
    as_json: bool,
    printed: bool = False,
) -> None:
    """Run a transcription and print its transcript; exit if it ended early.

    Args:
        job: returns the transcript.
        subtitles: how subtitles are cut.
        output_format: of the transcript, if it is not printed as JSON.
        as_json: whether all details are printed as JSON.
        printed: whether the job prints its plain text itself. Default: False.

    Raises:
        IncompleteError, Interrupted: it ended before anything was transcribed.
    """
    transcript, failure = _run(job)
    for start in transcript.truncated:
        print_warning(
            f"the window at {start:.0f} s reached the limit of --max-tokens: the end of its text is missing"
        )
    if not printed:
        print_mismatches(transcript.segments)
    if as_json:
        print_json(asdict(transcript))
    else:
        _print(transcript, output_format, subtitles, printed=printed)
    if failure is not None:
        _print_incomplete(transcript, failure)
        sys.exit(1 if isinstance(failure, IncompleteError) else interrupts.exit_status())


def _run(
    job: Callable[[], Transcript],
) -> tuple[Transcript, IncompleteError | Interrupted | None]:
    """The transcript, and the error that ended it early, if any.

    Raises:
        IncompleteError, Interrupted: nothing was transcribed before.
    """
    try:
        return job(), None
    except (IncompleteError, Interrupted) as early:
        if not early.transcript.segments:
            raise
        return early.transcript, early


def _print(
    transcript: Transcript, output_format: str, subtitles: SubtitleOptions, *, printed: bool
) -> None:
    """Print the transcript on stdout; `printed`: its plain text is there already."""
    if output_format == "txt" and not printed:
        write(f"{one_line(transcript.text)}\n")
    elif output_format != "txt":
        language = transcript.language
        write(write_as(output_format, transcript.segments, language=language, options=subtitles))
    if not transcript.text and not any(segment.match for segment in transcript.segments):
        print_note("no speech was found in the audio")


def print_mismatches(segments: Sequence[Segment], name: str = "") -> None:
    """Print a note about each segment whose speech is no sentence of the grammar.

    Args:
        segments: of the audio.
        name: of the audio file, if there are several.
    """
    for segment in segments:
        if segment.match is not None and not segment.match.matched:
            where = f"{segment.start:.1f} s to {segment.end:.1f} s"
            text = f"{name and f'{name}, '}{where}: no match (score {segment.match.score:.1f})"
            print_note(text, important=True)


def _print_incomplete(transcript: Transcript, failure: IncompleteError | Interrupted) -> None:
    where = f"the transcript of the first {transcript.segments[-1].end:.1f} s is on standard output"
    if isinstance(failure, IncompleteError):
        print_error(failure)
        print_note(where, important=True)
    else:
        print_note(f"interrupted: {where}", important=True)
