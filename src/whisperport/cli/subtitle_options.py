"""The options of `whisperport transcribe` that cut srt and vtt, named and refused as openai-whisper's."""

from collections.abc import Callable
from typing import Any

import click

from whisperport.cli.console import print_warning
from whisperport.text import SubtitleOptions

Command = Callable[..., None]

OPTIONS = (
    click.option(
        "--highlight-words",
        is_flag=True,
        help="In srt and vtt, with `--words`: underline each word while it is spoken",
    ),
    click.option(
        "--max-line-width",
        type=click.IntRange(min=1),
        metavar="CHARACTERS",
        help="In srt and vtt, with `--words`: longer lines are cut between words",
    ),
    click.option(
        "--max-line-count",
        type=click.IntRange(min=1),
        metavar="LINES",
        help="With `--max-line-width`: of a subtitle, which then runs on over segments",
    ),
    click.option(
        "--max-words-per-line",
        type=click.IntRange(min=1),
        metavar="WORDS",
        help="In srt and vtt, with `--words`: a segment is cut after so many",
    ),
)


def subtitle_options(command: Command) -> Command:
    """Add them all, in this order."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def chosen_subtitles(chosen: dict[str, Any], form: str, words: bool) -> SubtitleOptions:
    """What was chosen, by the names of the options.

    Args:
        form: in which the result is written.
        words: whether it will have times of words.

    Raises:
        click.UsageError: something is asked of a form that is no subtitles, or without words.
    """
    names = ("highlight_words", "max_line_width", "max_line_count", "max_words_per_line")
    options = SubtitleOptions(**{name: chosen[name] for name in names})
    for name in options.asked:
        if form not in ("srt", "vtt"):
            raise click.UsageError(f"{_flag(name)} needs --format srt or --format vtt")
        if not words:
            raise click.UsageError(f"{_flag(name)} needs --words")
    if options.max_line_count and not options.max_line_width:
        print_warning("--max-line-count has no effect without --max-line-width")
    if options.max_words_per_line and options.joined:
        print_warning(
            "--max-words-per-line has no effect with --max-line-width and --max-line-count"
        )
    return options


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
