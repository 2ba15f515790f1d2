"""The command line: its verbs, its exit status, and how errors are printed."""

import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, TextIO

import click
from click.shell_completion import CompletionItem, shell_complete

import whisperport
from whisperport.apps.cli.console import (
    WIDTH,
    print_error,
    print_note,
    print_usage_error,
    print_warning,
    write,
)
from whisperport.errors import UsageError, WhisperportError, out_of_memory
from whisperport.system import interrupts
from whisperport.system.system_error import system_error

FAILED = 1  # an error, or a comparison failed; click uses 2 for wrong usage
READER_GONE = 128 + 13  # the status of a process that SIGPIPE ended; Windows lacks the signal
STDERR = 2  # file descriptor of standard error, the last of the standard streams
COMPLETE = "_WHISPERPORT_COMPLETE"  # environment variable of click's completion for shells
TRACEBACK = "WHISPERPORT_TRACEBACK"  # environment variable: if not empty, defects print a traceback


_VERBS = (
    *("fetch", "export", "convert", "compile", "import"),
    *("check", "explain", "fix", "lower", "inspect", "compare", "sensitivity", "judge"),
    *("verify", "diagnose", "transcribe", "live", "serve", "archive", "bench"),
    *("plan", "targets", "apps", "doctor", "demo"),
)
# Module and function of the verbs whose names Python uses itself; all others have their verb's name.
_OTHER_NAMES = {"compile": ("compile", "compile_verb"), "import": ("import_", "import_verb")}


class _Verbs(Mapping[str, click.Command]):
    """The verbs by name. Each is imported when it is first used: a server starts without the others."""

    def __getitem__(self, name: str) -> click.Command:
        if name not in _VERBS:
            raise KeyError(name)
        module, function = _OTHER_NAMES.get(name, (name, name))
        verb: click.Command = getattr(import_module(f"whisperport.apps.cli.{module}"), function)
        return verb

    def __iter__(self) -> Iterator[str]:
        return iter(_VERBS)

    def __len__(self) -> int:
        return len(_VERBS)


class _InOrder(click.Group):
    """Lists the verbs in their order; click sorts them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The verbs by their names: their help would import them all, which takes seconds."""
        names = [CompletionItem(name) for name in _VERBS if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]


@click.group(
    cls=_InOrder,
    commands=_Verbs(),
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
)
@click.version_option(whisperport.__version__, prog_name="whisperport")
@click.pass_context
def cli(context: click.Context) -> None:
    """Port a Whisper checkpoint to an accelerator, verify the result, and transcribe with it.

    `whisperport COMMAND --help` explains one command.

    \b
    Examples:
      $ whisperport demo
      $ whisperport export openai/whisper-tiny --target xnnpack --out build/tiny-xnnpack
      $ whisperport transcribe talk.mp3 --bundle build/tiny-xnnpack
    """
    if context.invoked_subcommand is None:
        write(f"{context.get_help()}\n")


def main() -> None:
    """Run the command line and exit.

    The exit status is 0 if the verb succeeded and every comparison passed, 1 if it failed or a comparison
    failed, and 2 for wrong usage. A signal that interrupts gives 128 plus its number: 130 for Ctrl-C, 143
    for SIGTERM, 129 for SIGHUP. If the reader of standard output closed it, the status is 141 (SIGPIPE).
    """
    interrupts.install()
    try:
        try:
            status = _status()
            sys.stdout.flush()  # raise the error of a full disk here, not at the interpreter's exit
        except BrokenPipeError:  # the reader closed the pipe, as `| head -1` does
            _close_stdout()
            status = READER_GONE
        except OSError as error:
            print_error(system_error(error))
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
    """Prepare the streams, run the verb and print its error; return the exit status.

    Raises:
        OSError: the operating system could not read or write.
        click.Abort: Ctrl-C at a prompt.
    """
    _open_closed_streams()
    _ignore_lost_messages()
    _escape_unencodable()
    warnings.showwarning = _show_warning
    # The log of whisperport's modules, and of other packages that have no handler.
    logging.getLogger("whisperport").handlers = [_WarningPrinter(logging.WARNING)]
    logging.lastResort = _WarningPrinter(logging.WARNING)
    # Without a terminal, click would break lines at 80 columns, or at the value of COLUMNS.
    try:
        _check_stdout()
        if instruction := os.environ.get(COMPLETE):  # a shell asks what can follow
            return shell_complete(cli, {}, "whisperport", COMPLETE, instruction)
        width = None if sys.stdout.isatty() else WIDTH
        # click's own `main` is not used: it handles interrupts and broken pipes itself.
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
    except SystemExit as exit_:  # a verb's status, raised after it printed its result
        return exit_.code if isinstance(exit_.code, int) else 0
    except Exception as error:
        print_error(_defect(error))
        if os.environ.get(TRACEBACK):
            print_note(traceback.format_exc(), important=True)
        return FAILED
    return 0


def _open_closed_streams() -> None:
    """Open the null device for each standard stream that was closed before Python started, as by `>&-`.

    Otherwise a file opened later could get the descriptor 2, to which libraries write messages.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # stays open


class _Messages(io.FileIO):
    """Standard error, where a message that cannot be written is lost and ends nothing."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:  # its disk is full, or its reader has closed the pipe
            return len(data)


def _ignore_lost_messages() -> None:
    """Let no message that cannot be written end the command: its result and its exit status count."""
    buffer = getattr(sys.stderr, "buffer", None)  # not in tests and notebooks
    if isinstance(getattr(buffer, "raw", buffer), io.FileIO):
        messages = io.BufferedWriter(_Messages(sys.stderr.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(
            messages, sys.stderr.encoding, sys.stderr.errors, line_buffering=True
        )


def _check_stdout() -> None:
    """Check, before any work, that standard output can be written to: every verb prints its result there.

    Raises:
        UsageError: standard output is closed or cannot be written to.
    """
    why = "it was closed before the command started, as by `>&-`"
    if sys.stdout is not None:
        try:
            os.write(sys.stdout.fileno(), b"")
            return
        except io.UnsupportedOperation:  # not a file, as in tests and notebooks
            return
        except OSError as error:
            why = str(error)
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # stays open
    raise UsageError(
        "the result cannot be written to standard output",
        why=why,
        hint="redirect it to a file, or to /dev/null to discard the result",
    )


def _escape_unencodable() -> None:
    """Let stdout escape characters that its encoding lacks, as stderr does: printing must not fail."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _close_stdout() -> None:
    """Point stdout to the null device: the interpreter flushes it at exit, and this must not fail."""
    with suppress(OSError, ValueError):  # stdout is not a file, so that no flush can fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _defect(error: Exception) -> WhisperportError:
    """An unexpected exception as an error that asks for a report, unless memory was short."""
    return out_of_memory(error) or WhisperportError(
        "whisperport failed with an unexpected error",
        why=f"{type(error).__name__}: {error}",
        hint=f"this is a defect: please report it, with the output of the same command under {TRACEBACK}=1",
    )


class _WarningPrinter(logging.Handler):
    """Prints log records as warnings."""

    def emit(self, record: logging.LogRecord) -> None:
        # Where it cannot be printed, as on a full disk, whoever warns is not disturbed.
        with suppress(OSError):
            print_warning(record.getMessage())


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a Python warning without the line of code that raised it; replaces `warnings.showwarning`."""
    print_warning(str(message))
