"""The options of `whisperport transcribe` that divide the audio into chunks of speech."""

from dataclasses import replace

import click
from click.core import ParameterSource

from whisperport.audio import VadOptions
from whisperport.cli.console import print_warning
from whisperport.cli.fields import field_options
from whisperport.cli.verb import option, together
from whisperport.errors import UsageError
from whisperport.transcription import TranscribeOptions

chunk_options = together(
    option(
        "--vad",
        group="Audio",
        is_flag=True,
        help="Find speech with a voice activity detector and transcribe only the speech chunks",
    ),
    option(
        "--pack",
        group="Audio",
        is_flag=True,
        help="Shorten silence so that each window holds as much speech as possible; requires --vad. Fewer "
        "windows are computed. A model for short utterances makes more errors",
    ),
    field_options(TranscribeOptions, "workers", "batch", group="Runtime"),
)


def with_chunks(
    options: TranscribeOptions, vad: bool, pack: bool, workers: int, batch: bool
) -> TranscribeOptions:
    """The options with `--vad`, `--pack`, `--workers` and `--batch` applied.

    Raises:
        UsageError: `--pack` without `--vad`, or clips together with `--vad`.
    """
    if pack and not vad:
        raise UsageError(
            "`--pack` requires `--vad`",
            why="without speech chunks, each window begins where the one before it ended",
            hint="add `--vad`",
        )
    source = click.get_current_context().get_parameter_source("condition_on_previous_text")
    if vad and source is ParameterSource.COMMANDLINE and options.condition_on_previous_text:
        print_warning("with --vad, the previous text is used as a prompt within its own chunk only")
    chunks = VadOptions(pack=pack) if vad else None
    return replace(options, vad=chunks, workers=workers, batch=batch)
