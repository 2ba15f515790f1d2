"""The options of `whisperport transcribe` that divide the audio into chunks of speech."""

from dataclasses import replace

import click
from click.core import ParameterSource

from whisperport.audio import VadOptions
from whisperport.cli.console import print_warning
from whisperport.cli.verb import IntRange, option, together
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
    option(
        "--workers",
        group="Runtime",
        type=IntRange(1, 64),
        default=1,
        show_default=True,
        metavar="N",
        help="Number of threads that transcribe several files, or with --vad the speech chunks of one, in "
        "parallel. Each uses --threads threads; without --threads, the cores are divided among them",
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
