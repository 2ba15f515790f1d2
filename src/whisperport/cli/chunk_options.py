"""The options of `whisperport transcribe` that divide the audio into chunks of speech."""

from dataclasses import replace

import click
from click.core import ParameterSource

from whisperport.audio import VadOptions
from whisperport.cli.console import print_warning
from whisperport.cli.verb import IntRange, option, together
from whisperport.transcription import TranscribeOptions

chunk_options = together(
    option(
        "--vad",
        group="Audio",
        is_flag=True,
        help="Find speech with a voice activity detector and transcribe only the speech chunks",
    ),
    option(
        "--workers",
        group="Runtime",
        type=IntRange(1, 64),
        default=1,
        show_default=True,
        metavar="N",
        help="Number of speech chunks transcribed in parallel; requires --vad. Fastest with "
        "--threads 1, because each worker uses --threads threads",
    ),
    option(
        "--batch/--no-batch",
        group="Runtime",
        default=True,
        show_default=True,
        help="Decode speech chunks, files, beams and samples together if the bundle has a program step_B; "
        "the text is the same, and more memory is needed",
    ),
)


def with_chunks(
    options: TranscribeOptions, vad: bool, workers: int, batch: bool
) -> TranscribeOptions:
    """The options with `--vad`, `--workers` and `--batch` applied.

    Raises:
        UsageError: several workers without `--vad`, or clips together with `--vad`.
    """
    source = click.get_current_context().get_parameter_source("condition_on_previous_text")
    if vad and source is ParameterSource.COMMANDLINE and options.condition_on_previous_text:
        print_warning("with --vad, the previous text is used as a prompt within its own chunk only")
    return replace(options, vad=VadOptions() if vad else None, workers=workers, batch=batch)
