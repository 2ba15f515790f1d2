"""The options of `whisperport transcribe` for decoding, with openai-whisper's names, and for chunks."""

from dataclasses import replace
from typing import Any

import click
from click.core import ParameterSource

from whisperport.audio import VadOptions
from whisperport.cli.console import print_warning
from whisperport.cli.fields import field_options, field_values
from whisperport.cli.verb import option, together
from whisperport.errors import UsageError
from whisperport.runtime import DecodeOptions, Thresholds
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions

DECODING = "Decoding"
PROMPT = "Prompt"
FALLBACK = "Fallback (when a window is decoded again, or skipped as silence)"

audio_options = field_options(TranscribeOptions, "clip_timestamps", group="Audio")
word_options = field_options(
    TranscribeOptions,
    *("word_timestamps", "prepend_punctuations", "append_punctuations"),
    group="Word timestamps",
)
decoding_options = together(
    field_options(DecodeOptions, group=DECODING),
    field_options(TranscribeOptions, "temperatures", group=DECODING),
    field_options(
        TranscribeOptions,
        *("initial_prompt", "carry_initial_prompt", "condition_on_previous_text", "prefix"),
        group=PROMPT,
    ),
    field_options(Thresholds, group=FALLBACK),
    field_options(TranscribeOptions, "hallucination_silence_threshold", group=FALLBACK),
)


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


def transcribe_options(chosen: dict[str, Any], run: RunOptions) -> TranscribeOptions:
    """The options object made of the chosen values.

    Args:
        chosen: values by parameter name, as click parsed them.

    Raises:
        UsageError: a value is out of its range, or needs another option.
    """
    return TranscribeOptions(
        decode=DecodeOptions(**field_values(DecodeOptions, chosen)),
        run=run,
        thresholds=Thresholds(**field_values(Thresholds, chosen)),
        **field_values(TranscribeOptions, chosen),
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
