"""The options of `whisperport transcribe` that cut a recording into chunks of speech."""

from collections.abc import Callable
from dataclasses import replace

import click
from click.core import ParameterSource

from whisperport.audio import VadOptions
from whisperport.cli.console import print_warning
from whisperport.transcription import TranscribeOptions

Command = Callable[..., None]

OPTIONS = (
    click.option(
        "--vad",
        is_flag=True,
        help="Find speech, and transcribe chunks of it; silence is passed over",
    ),
    click.option(
        "--workers",
        type=click.IntRange(1, 64),
        default=1,
        show_default=True,
        help="Chunks at once; needs --vad, and --threads 1 suits it",
    ),
)


def chunk_options(command: Command) -> Command:
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def with_chunks(options: TranscribeOptions, vad: bool, workers: int) -> TranscribeOptions:
    """The options, with chunks if they were asked for.

    Raises:
        UsageError: several workers without chunks, or clips and chunks.
    """
    asked = click.get_current_context().get_parameter_source("condition_on_previous_text")
    if vad and asked is ParameterSource.COMMANDLINE and options.condition_on_previous_text:
        print_warning("with --vad, what was said is the prompt within its own chunk only")
    return replace(options, vad=VadOptions() if vad else None, workers=workers)
