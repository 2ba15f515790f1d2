"""What a person sees: results on stdout, everything else on stderr."""

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
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from whisperport.errors import WhisperportError
from whisperport.text.printable import escaped_json, is_printable, printable

WIDTH = 100  # columns, where no terminal says how many it has
WORTH_A_LINE_S = 1.0  # a stage that took less leaves none behind

stderr = Console(stderr=True, highlight=False, emoji=False)


def print_json(data: Any) -> None:
    """One JSON document on stdout, which is safe to look at; sets are sorted."""
    document = json.dumps(data, ensure_ascii=False, indent=2, default=sorted)
    write(f"{escaped_json(document)}\n")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout, at most as wide as the terminal, or 100 columns."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    width = None if sys.stdout.isatty() else WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as drawn:
        console.print(table)
    write("".join(f"{line.rstrip()}\n" for line in drawn.get().splitlines()))


def print_lines(*lines: str) -> None:
    """Lines of a result on stdout; none can become two."""
    write("".join(f"{printable(line)}\n" for line in lines))


def write(text: str) -> None:
    """On stdout, as it is: what the writers of transcripts made safe, or what holds no foreign text."""
    print(text, end="")


Word = str | os.PathLike[str]


def print_next(*words: Word) -> None:
    """The last line: the command to try next, whisperport's with these words, to be copied to a shell."""
    sys.stdout.flush()  # one that cannot be written is an error, and has no next command
    _say("")
    _say(f"next: {' '.join(map(_quoted, ('whisperport', *map(str, words))))}")


def _quoted(word: str) -> str:
    """As a shell reads it; what cannot be shown, or is not UTF-8, in bash's, ksh's and zsh's `$'…'`."""
    if is_printable(word):
        return shlex.quote(word)
    return f"$'{''.join(map(_in_quotes, word))}'"


def _in_quotes(character: str) -> str:
    if is_printable(character):
        return f"\\{character}" if character in "\\'" else character
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def print_error(error: WhisperportError) -> None:
    """What happened, why, and what to do next."""
    _say(f"error: {printable(error.what)}", style="bold red")
    if error.why:
        _say_labelled("  why: ", error.why)
    if error.hint:
        _say("")
        _say_labelled("hint: ", error.hint)


def print_usage_error(error: click.ClickException) -> None:
    """A command line that does not say what to do, in the form of every other error."""
    message = _uncapitalized(error.format_message()).rstrip(".")
    _say(f"error: {printable(message)}", style="bold red")
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is not None:
        _say(f"  {' '.join(_uncapitalized(context.get_usage()).split())}")
        _say("")
        _say(f"hint: {context.command_path} --help")


def print_warning(message: str) -> None:
    """Something the user should know, and can go on with."""
    _say_labelled("warning: ", message, style="yellow")


def print_note(message: str) -> None:
    """A line beside the result, or several."""
    _say_labelled("", message)


def _say_labelled(label: str, text: str, style: str | None = None) -> None:
    """Text of other packages may have several lines: those after the first do not look like ours."""
    for line in text.rstrip("\n").split("\n"):
        _say(f"{label}{line}", style=style)
        label = " " * max(len(label), 2)


def _say(line: str, style: str | None = None) -> None:
    """A line on stderr: neither wrapped nor read as markup, so that it can be copied.

    Everything on stderr comes through here or through `Stages`, `audio_bar` and the live screen, which
    escape as well: nothing that a terminal obeys is let through.
    """
    stderr.print(printable(line), markup=False, soft_wrap=True, style=style)


def shortened(name: str, width: int) -> str:
    """A name's two ends: names of nodes tell most there."""
    if len(name) <= width:
        return name
    return f"{name[: width // 2]}…{name[-(width - width // 2 - 1) :]}"


def shown_path(path: Path) -> Path:
    """Relative to here, where that is shorter."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


class Stages:
    """Says what is being done, and how long each stage took; a spinner where there is a terminal."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=None) if progress else None
        self._stage = ""
        self._started = time.perf_counter()

    def __call__(self, stage: str) -> None:
        self.finish()
        self._stage, self._started = printable(stage), time.perf_counter()
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=self._stage)

    def finish(self) -> None:
        """Leave a line for the stage that is over, if one would want to know what took so long."""
        seconds = time.perf_counter() - self._started
        if self._stage and seconds >= WORTH_A_LINE_S:
            console = self._progress.console if self._progress else stderr
            line = f"  {seconds:6.1f} s  {self._stage}"
            console.print(line, markup=False, soft_wrap=True, style="dim")
        self._stage = ""


@contextmanager
def stages() -> Iterator[Stages]:
    """A progress line for work in stages."""
    if not stderr.is_terminal:
        shown = Stages(None)
        yield shown
        shown.finish()
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True) as progress:
        shown = Stages(progress)
        yield shown
        shown.finish()


class AudioBar:
    """A bar that moves in audio time."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress = progress
        self._task = progress.add_task(printable(label), total=None, at="loading")

    def __call__(self, done_s: float, of_s: float | None) -> None:
        of = f" of {_clock(of_s)}" if of_s else ""
        self._progress.update(self._task, completed=done_s, total=of_s, at=_clock(done_s) + of)


@contextmanager
def audio_bar(label: str) -> Iterator[AudioBar]:
    """A bar for one recording; nothing where there is no terminal."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[at]}"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=stderr, transient=True, disable=not stderr.is_terminal
    ) as progress:
        yield AudioBar(progress, label)


def _uncapitalized(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
