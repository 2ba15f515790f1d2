"""The command line: verbs, and what happens when one of them fails."""

import io
import logging
import os
import sys
import traceback
import warnings
from contextlib import suppress
from typing import TextIO

import click

import whisperport
from whisperport import interrupts
from whisperport.cli.bench import bench
from whisperport.cli.check import check
from whisperport.cli.compile import compile_verb
from whisperport.cli.console import (
    WIDTH,
    print_error,
    print_note,
    print_usage_error,
    print_warning,
    write,
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
from whisperport.errors import UsageError, WhisperportError

FAILED = 1  # or not equal, where something was compared; click's own 2 means wrong usage
READER_GONE = 128 + 13  # as of a process that SIGPIPE ended; Windows lacks the signal
STDERR = 2  # its file descriptor, the last of the standard ones
TRACEBACK = (
    "WHISPERPORT_TRACEBACK"  # an environment variable: not empty, where a defect is reported
)


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
    """Take any Whisper checkpoint to an accelerator, and verify that it still transcribes.

    \b
    Example:
      $ whisperport demo
    """
    if context.invoked_subcommand is None:
        write(f"{context.get_help()}\n")


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
    """Exit status 0: done, and equal where something was compared; 1: failed or not equal; 2: wrong usage.

    A signal that interrupts gives 128 and its number: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP, and
    141, that of SIGPIPE, where the reader of standard output went away.
    """
    interrupts.install()
    try:
        try:
            status = _status()
            sys.stdout.flush()  # a full disk shows now, and not when the interpreter ends
        except BrokenPipeError:  # `| head -1` has what it wanted
            _close_stdout()
            status = READER_GONE
        except OSError as error:
            print_error(_explained(error))
            _close_stdout()
            status = FAILED
    except (KeyboardInterrupt, click.Abort):
        try:
            sys.stdout.flush()
        except OSError:
            _close_stdout()
        interrupts.leave()
    sys.exit(status)


def _status() -> int:
    """Prepare the streams, run the verb, and print what failed; the system's errors are raised."""
    _open_closed_streams()
    _write_any_character()
    warnings.showwarning = _show_warning
    # What our modules log, and what other packages log to nobody.
    logging.getLogger("whisperport").handlers = [_ToPerson(logging.WARNING)]
    logging.lastResort = _ToPerson(logging.WARNING)
    # Away from a terminal click would break lines at 80 columns, or at whatever COLUMNS says.
    try:
        _check_stdout()
        width = None if sys.stdout.isatty() else WIDTH
        # Not click's `main`, which answers interrupts and broken pipes in its own way.
        with cli.make_context("whisperport", sys.argv[1:], terminal_width=width) as context:
            cli.invoke(context)
    except WhisperportError as error:
        print_error(error)
        return FAILED
    except (click.Abort, OSError):
        raise
    except click.exceptions.Exit as exit_:  # after --help
        return exit_.exit_code
    except click.ClickException as error:
        print_usage_error(error)
        return error.exit_code
    except SystemExit as exit_:  # a verb's own status, after its result
        return exit_.code if isinstance(exit_.code, int) else 0
    except Exception as error:
        print_error(_defect(error))
        if os.environ.get(TRACEBACK):
            print_note(traceback.format_exc())
        return FAILED
    return 0


def _open_closed_streams() -> None:
    """Python has None for a stream that was closed before it began, as by `>&-` or some services.

    A file that is opened later must not get the number of one: libraries write messages to 2.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # until the end


def _check_stdout() -> None:
    """Every verb has a result: learn before hours of work, not after, that there is nowhere to write it.

    Raises:
        UsageError: standard output is closed, or cannot be written to.
    """
    why = "it was closed before the command began, as by `>&-`"
    if sys.stdout is not None:
        try:
            os.write(sys.stdout.fileno(), b"")
            return
        except io.UnsupportedOperation:  # no file at all, as in tests and notebooks
            return
        except OSError as error:
            why = str(error)
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # until the end
    raise UsageError(
        "the result cannot be written to standard output",
        why=why,
        hint="redirect it to a file, or to /dev/null if it is not wanted",
    )


def _write_any_character() -> None:
    """One that the output's encoding lacks is escaped, as on stderr: a result is no reason to fail."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _close_stdout() -> None:
    """The interpreter flushes once more as it ends, and must not fail then."""
    with suppress(OSError, ValueError):  # it is no file, and needs no flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _defect(error: Exception) -> WhisperportError:
    """What should not happen, in the form of every other error."""
    if isinstance(error, MemoryError):
        return WhisperportError(
            "there is not enough memory",
            why=str(error),
            hint="free some, or use a machine with more",
        )
    return WhisperportError(
        "whisperport failed in a way that it does not know",
        why=f"{type(error).__name__}: {error}",
        hint=f"this is a defect: please report it, with what {TRACEBACK}=1 adds to this output",
    )


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
