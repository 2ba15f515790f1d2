"""Print one transcript on standard output, complete or as far as it came before an error or Ctrl-C."""

import sys
from collections.abc import Callable
from dataclasses import asdict

from whisperport.apps.cli.console import print_error, print_json, print_note, print_warning, write
from whisperport.apps.cli.verb import option
from whisperport.errors import IncompleteError, Interrupted
from whisperport.speech.text import SubtitleOptions, write_as
from whisperport.system import interrupts
from whisperport.system.printable import one_line
from whisperport.transcription import Transcript

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
    if not transcript.text:
        print_note("no speech was found in the audio")


def _print_incomplete(transcript: Transcript, failure: IncompleteError | Interrupted) -> None:
    where = f"the transcript of the first {transcript.segments[-1].end:.1f} s is on standard output"
    if isinstance(failure, IncompleteError):
        print_error(failure)
        print_note(where, important=True)
    else:
        print_note(f"interrupted: {where}", important=True)
