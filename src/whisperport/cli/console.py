"""What a person sees: results on stdout, everything else on stderr."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from whisperport.errors import WhisperportError

WIDTH = 100  # columns of a table on no terminal

stdout = Console(soft_wrap=True, highlight=False)
stderr = Console(stderr=True, highlight=False)


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(data, ensure_ascii=False, indent=2) + "\n")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout, at most as wide as the terminal, or 100 columns."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False).print(
        table, markup=False
    )


def print_next(command: str) -> None:
    """The last line: the command to try next."""
    stderr.print(f"\nnext: {command}", markup=False)


def print_error(error: WhisperportError) -> None:
    """What happened, why, and what to do next."""
    stderr.print(f"error: {error.what}", markup=False, style="bold red", soft_wrap=True)
    if error.why:
        stderr.print(f"  why: {error.why}", markup=False, soft_wrap=True)
    if error.hint:
        stderr.print(f"\nhint: {error.hint}", markup=False, soft_wrap=True)


class Stages:
    """Says what is being done, and how long each stage took; a spinner where there is a terminal."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=None) if progress else None
        self._stage = ""
        self._started = time.perf_counter()

    def __call__(self, stage: str) -> None:
        self.finish()
        self._stage, self._started = stage, time.perf_counter()
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=stage)

    def finish(self) -> None:
        """Leave a line for the stage that is over."""
        if self._stage:
            seconds = time.perf_counter() - self._started
            console = self._progress.console if self._progress else stderr
            console.print(f"  {seconds:6.1f} s  {self._stage}", markup=False, style="dim")
            self._stage = ""


@contextmanager
def stages() -> Iterator[Stages]:
    """A progress line for work in stages."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    if not stderr.is_terminal:
        shown = Stages(None)
        yield shown
        shown.finish()
        return
    with Progress(*columns, console=stderr, transient=True) as progress:
        shown = Stages(progress)
        yield shown
        shown.finish()


class AudioBar:
    """A bar that moves in audio time."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=None, at="0:00")

    def __call__(self, done_s: float, of_s: float | None) -> None:
        of = f" of {_clock(of_s)}" if of_s else ""
        self._progress.update(self._task, completed=done_s, total=of_s, at=_clock(done_s) + of)


@contextmanager
def audio_bar(label: str) -> Iterator[AudioBar]:
    """A bar for one recording."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[at]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr, transient=True) as progress:
        yield AudioBar(progress, label)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
