"""Printing: results on stdout, everything else on stderr; all text is escaped for terminals."""

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from whisperport.errors import WhisperportError
from whisperport.system.printable import escaped_json, is_printable, printable
from whisperport.system.progress import Counted, Remaining, remaining_text, reporting

WIDTH = 100  # columns of output that does not go to a terminal
MIN_REPORTED_S = 1.0  # the time of a shorter stage is not printed

stderr = Console(stderr=True, highlight=False, emoji=False)
_quiet = False


def be_quiet(quiet: bool) -> None:
    """Print no progress, no notes and no next command from now on; or print them again."""
    global _quiet
    _quiet = quiet


def shows_progress() -> bool:
    """Return whether progress is shown: stderr is a terminal, and `--quiet` was not given."""
    return stderr.is_terminal and not _quiet


def print_json(data: Any) -> None:
    """Print one JSON document on stdout, with control characters escaped and sets sorted."""
    document = json.dumps(data, ensure_ascii=False, indent=2, default=sorted)
    write(f"{escaped_json(document)}\n")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout, at most as wide as the terminal; 100 columns if there is none."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    width = None if sys.stdout.isatty() else WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(table)
    write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def print_filled(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table without its empty columns."""
    filled = [place for place in range(len(headings)) if any(row[place] for row in rows)]
    print_table(
        [headings[place] for place in filled], [[row[place] for place in filled] for row in rows]
    )


def print_lines(*lines: str) -> None:
    """Print lines of a result on stdout; line breaks inside a line are escaped."""
    write("".join(f"{printable(line)}\n" for line in lines))


def write(text: str) -> None:
    """Write text to stdout unchanged; the caller has escaped it."""
    print(text, end="")


Argument = str | os.PathLike[str]


def print_next(*arguments: Argument) -> None:
    """Print the suggested next `whisperport` command on stderr, quoted for a shell."""
    sys.stdout.flush()  # raises if the result cannot be written; no command is suggested then
    if _quiet:
        return
    _print_stderr("")
    _print_stderr(f"next: {command_line(*arguments)}")


def command_line(*arguments: Argument) -> str:
    """The `whisperport` command with these arguments, quoted for a shell."""
    return " ".join(map(_quoted, ("whisperport", *map(str, arguments))))


def _quoted(argument: str) -> str:
    """The argument quoted for a shell; `$'…'` (bash, ksh, zsh) if it is not printable UTF-8."""
    if is_printable(argument):
        return shlex.quote(argument)
    return f"$'{''.join(map(_in_quotes, argument))}'"


def _in_quotes(character: str) -> str:
    if is_printable(character):
        return f"\\{character}" if character in "\\'" else character
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def print_error(error: WhisperportError) -> None:
    """Print what happened, why, and what to do next."""
    _print_stderr(f"error: {printable(error.what)}", style="bold red")
    if error.why:
        _print_labelled("  why: ", error.why)
    if error.hint:
        _print_stderr("")
        _print_labelled("hint: ", error.hint)


class HintedUsageError(click.UsageError):
    """A usage error that says what to do, in place of the command that shows the help."""

    def __init__(self, message: str, ctx: click.Context | None, hint: str) -> None:
        super().__init__(message, ctx)
        self.hint = hint


def print_usage_error(error: click.ClickException) -> None:
    """Print an error of click about the command line, in the form of every other error."""
    message = _uncapitalized(error.format_message()).rstrip(".")
    _print_stderr(f"error: {printable(message)}", style="bold red")
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is not None:
        _print_stderr(f"  {' '.join(_uncapitalized(context.get_usage()).split())}")
        _print_stderr("")
        hint = f"{context.command_path} --help"
        _print_labelled("hint: ", error.hint if isinstance(error, HintedUsageError) else hint)


def print_warning(message: str) -> None:
    """Print a warning on stderr; the command continues."""
    _print_labelled("warning: ", message, style="yellow")


def print_note(message: str, *, important: bool = False) -> None:
    """Print one or more lines of information on stderr; with `--quiet` only what is important."""
    if important or not _quiet:
        _print_labelled("", message)


def _print_labelled(label: str, text: str, style: str | None = None) -> None:
    """Print text with a label before its first line; indent the others, so that none can fake a label."""
    for line in text.rstrip("\n").split("\n"):
        _print_stderr(f"{label}{line}", style=style)
        label = " " * max(len(label), 2)


def _print_stderr(line: str, style: str | None = None) -> None:
    """Print a line on stderr, not wrapped and without markup, so that it can be copied.

    All output on stderr goes through this function, `Stages`, `audio_bar` or the live screen. Each escapes
    the control characters of terminals.
    """
    stderr.print(printable(line), markup=False, soft_wrap=True, style=style)


def shortened(name: str, width: int) -> str:
    """A name cut in its middle to `width` characters: the two ends of a node's name tell most."""
    if len(name) <= width:
        return name
    return f"{name[: width // 2]}…{name[-(width - width // 2 - 1) :]}"


def shown_path(path: Path) -> Path:
    """The path relative to the working directory, if it lies in it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


class RemainingColumn(ProgressColumn):
    """The remaining time of a task, from its field `remaining`; empty as long as there is no estimate."""

    def render(self, task: Task) -> Text:
        return Text(remaining_text(task.fields["remaining"].seconds()), style="dim")


class Stages:
    """Shows the current stage with a spinner on a terminal, and prints how long each stage took.

    Of stages that are counted, such as the clips of a verification, it shows how long the rest will take.
    """

    def __init__(self, progress: Progress | None, remaining: Remaining | None = None) -> None:
        self._progress = progress
        self._remaining = remaining or Remaining()
        self._task = (
            progress.add_task("starting", total=None, remaining=self._remaining)
            if progress
            else None
        )
        self._stage = ""
        self._started = time.perf_counter()

    def __call__(self, stage: str) -> None:
        self.finish()
        self._stage, self._started = printable(stage), time.perf_counter()
        if isinstance(stage, Counted):
            self._remaining.report(stage.n_finished, stage.total)
        else:
            self._remaining.report(0, None)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=self._stage)

    def finish(self) -> None:
        """End the current stage, and print its time if it took a second or more."""
        seconds = time.perf_counter() - self._started
        if self._stage and seconds >= MIN_REPORTED_S and not _quiet:
            console = self._progress.console if self._progress else stderr
            line = f"  {seconds:6.1f} s  {self._stage}"
            console.print(line, markup=False, soft_wrap=True, style="dim")
        self._stage = ""


@contextmanager
def stages() -> Iterator[Stages]:
    """Show the progress of work in stages on stderr."""
    if not shows_progress():
        shown = Stages(None)
        with reporting(shown):
            yield shown
        shown.finish()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        RemainingColumn(),
    )
    with Progress(*columns, console=stderr, transient=True) as progress:
        shown = Stages(progress)
        with reporting(shown):
            yield shown
        shown.finish()


class AudioBar:
    """A progress bar in seconds of audio."""

    def __init__(self, progress: Progress, label: str, remaining: Remaining | None = None) -> None:
        self._progress = progress
        self._remaining = remaining or Remaining()
        self._task = progress.add_task(
            printable(label), total=None, at="loading", remaining=self._remaining
        )

    def __call__(self, done_s: float, total_s: float | None) -> None:
        self._remaining.report(done_s, total_s)
        of = f" of {_clock(total_s)}" if total_s else ""
        self._progress.update(self._task, completed=done_s, total=total_s, at=_clock(done_s) + of)


@contextmanager
def audio_bar(label: str) -> Iterator[AudioBar]:
    """Show the progress of one audio file on stderr, if progress is shown."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[at]}"),
        TimeElapsedColumn(),
        RemainingColumn(),
    )
    with Progress(
        *columns, console=stderr, transient=True, disable=not shows_progress()
    ) as progress:
        yield AudioBar(progress, label)


def _uncapitalized(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
