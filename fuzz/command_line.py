"""Run `whisperport ...` in this process, and check the text that it writes to the terminal."""

import contextlib
import io
import re
import unicodedata

import click

from whisperport.errors import WhisperportError

ALLOWED = {"\n", "\t"}
NOT_FINITE = re.compile(r"(?<![\w.])-?(nan|inf|NaN|Infinity)(?![\w.])")


class UnsafeOutputError(Exception):
    """Unsafe text was printed; `kind` is "control characters" or "not finite"."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text!r}")
        self.kind = kind


def whisperport(*arguments: str) -> None:
    """Run a verb of the command line.

    Raises:
        click.ClickException, WhisperportError: the error of the verb.
        UnsafeOutputError: the verb printed control characters, a NaN or an infinity.
    """
    from whisperport.apps.cli.main import cli

    stdout, stderr = io.StringIO(), io.StringIO()
    error: WhisperportError | click.ClickException | None = None
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            cli(list(arguments), prog_name="whisperport", standalone_mode=False)
        except WhisperportError as raised:
            error = raised
        except click.ClickException as raised:
            error = raised
        except SystemExit:
            pass  # `check` found something that the target does not support
    shown = printed(error) if isinstance(error, WhisperportError) else ""
    check_printed(stdout.getvalue() + stderr.getvalue() + shown)
    check_finite(stdout.getvalue())
    if error is not None:
        raise error


def printed(error: WhisperportError) -> str:
    """Return an error as the command line prints it."""
    from whisperport.apps.cli.console import print_error

    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        print_error(error)
    return stderr.getvalue()


def check_printed(text: str) -> None:
    """Raise UnsafeOutputError for control characters, with which a file could change the terminal."""
    for letter in text:
        if unicodedata.category(letter) in ("Cc", "Cs") and letter not in ALLOWED:
            place = text.index(letter)
            raise UnsafeOutputError("control characters", text[max(0, place - 60) : place + 20])


def check_finite(text: str) -> None:
    """Raise UnsafeOutputError for a NaN or an infinity among results."""
    if found := NOT_FINITE.search(text):
        raise UnsafeOutputError("not finite", text[max(0, found.start() - 60) : found.end() + 20])
