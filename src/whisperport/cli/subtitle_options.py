"""The options of `whisperport transcribe` that lay out subtitles, with openai-whisper's names and rules."""

from typing import Any

import click

from whisperport.cli.console import print_warning
from whisperport.cli.fields import field_options, field_values
from whisperport.text import SubtitleOptions

SUBTITLES = "Subtitles (need --output-format srt or vtt, and also --word-timestamps or --live)"

subtitle_options = field_options(SubtitleOptions, group=SUBTITLES)


def chosen_subtitles(
    chosen: dict[str, Any], output_format: str, word_timestamps: bool
) -> SubtitleOptions:
    """The subtitle options made of the chosen values.

    Args:
        chosen: values by parameter name, as click parsed them.
        output_format: the format in which the transcript is written.
        word_timestamps: whether the transcript will have word timestamps.

    Raises:
        click.UsageError: an option needs another format, or word timestamps.
    """
    options = SubtitleOptions(**field_values(SubtitleOptions, chosen))
    for name in options.set_options:
        if output_format not in ("srt", "vtt"):
            raise click.UsageError(
                f"{_flag(name)} requires --output-format srt or --output-format vtt"
            )
        if not word_timestamps:
            raise click.UsageError(f"{_flag(name)} requires --word-timestamps")
    if options.max_line_count and not options.max_line_width:
        print_warning("--max-line-count has no effect without --max-line-width")
    if options.max_words_per_line and options.joins_segments:
        print_warning(
            "--max-words-per-line has no effect with --max-line-width and --max-line-count"
        )
    return options


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
