"""The command line: verbs, and what happens when one of them fails."""

import io
import logging
import os
import signal
import sys
import warnings
from contextlib import suppress
from typing import TextIO

import click

import whisperport
from whisperport.cli.bench import bench
from whisperport.cli.check import check
from whisperport.cli.compile import compile_verb
from whisperport.cli.console import (
    WIDTH,
    print_error,
    print_interrupted,
    print_usage_error,
    print_warning,
)
from whisperport.cli.demo import demo
from whisperport.cli.doctor import doctor
from whisperport.cli.explain import explain
from whisperport.cli.export import export
from whisperport.cli.import_ import import_verb
from whisperport.cli.inspect import inspect
from whisperport.cli.lower import lower
from whisperport.cli.targets import targets
from whisperport.cli.transcribe import transcribe
from whisperport.cli.verify import verify
from whisperport.errors import WhisperportError

FAILED = 1  # or not equal, where something was compared; click's own 2 means wrong usage


class _InOrder(click.Group):
    """Lists the verbs in the order in which one needs them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_InOrder,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
)
@click.version_option(whisperport.__version__, prog_name="whisperport")
@click.pass_context
def cli(context: click.Context) -> None:
    """Take any Whisper checkpoint to an accelerator, and prove that it still transcribes.

    \b
    Example:
      $ whisperport demo
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for verb in (
    export,
    compile_verb,
    import_verb,
    lower,
    check,
    explain,
    inspect,
    verify,
    transcribe,
    bench,
    targets,
    doctor,
    demo,
):
    cli.add_command(verb)


def main() -> None:
    """Exit 0: done, and equal where something was compared; 1: failed or not equal; 2: wrong usage."""
    _open_closed_streams()
    _write_any_character()
    warnings.showwarning = _show_warning
    logging.getLogger("whisperport").handlers = [_ToPerson(logging.WARNING)]
    _end_as_by_ctrl_c()
    # Away from a terminal click would break lines at 80 columns, or at whatever COLUMNS says.
    width = None if sys.stdout.isatty() else WIDTH
    try:
        cli(prog_name="whisperport", standalone_mode=False, terminal_width=width)
        print(end="", flush=True)  # a closed pipe shows now, and not when the interpreter ends
    except WhisperportError as error:
        print_error(error)
        sys.exit(FAILED)
    except click.ClickException as error:
        print_usage_error(error)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        print_interrupted()
        sys.exit(FAILED)
    except BrokenPipeError:  # `| head -1` has what it wanted
        _close_stdout()
        sys.exit(FAILED)
    except OSError as error:
        print_error(_explained(error))
        _close_stdout()
        sys.exit(FAILED)


def _open_closed_streams() -> None:
    """Python has None for a stream that was closed before it began, as by `>&-` or some services."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # until the end


def _write_any_character() -> None:
    """One that the output's encoding lacks is escaped, as on stderr: a result is no reason to fail."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _close_stdout() -> None:
    """The interpreter flushes once more as it ends, and must not fail then."""
    with suppress(OSError, ValueError):  # it is no file, and needs no flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explained(error: OSError) -> WhisperportError:
    """What no module has foreseen, in the form of every other error."""
    if not _is_somewhere():
        return WhisperportError(
            "the folder you are in is gone",
            why="it was deleted, or its disk unmounted, after you went there",
            hint="`cd` to another folder",
        )
    return WhisperportError(
        "the system refused to read or to write",
        why=str(error),
        hint="check the free space, the permissions and the disk",
    )


def _is_somewhere() -> bool:
    try:
        return bool(os.getcwd())
    except OSError:
        return False


def _end_as_by_ctrl_c() -> None:
    """`kill`, `timeout` and a closed terminal let a verb tidy up too; `nohup` is respected."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


class _ToPerson(logging.Handler):
    """What our modules log, as every other warning."""

    def emit(self, record: logging.LogRecord) -> None:
        print_warning(record.getMessage())


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """In place of Python's own, which shows the line of code that warned."""
    print_warning(str(message))
