"""The words of `whisperport live` on the terminal: final ones on stdout, tentative ones on stderr."""

import shutil
import sys

from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from whisperport.apps.cli.console import shows_progress, stderr, write
from whisperport.speech.text import Word
from whisperport.system.printable import one_line
from whisperport.transcription.live.transcriber import LiveUpdate

TRAILING_MARKS = (
    ".,!?:;…。，！？：；"  # not printed after the last final word: they may still change
)


class Screen:
    """Writes final words to stdout, one line per segment, and tentative words to one line on stderr.

    Args:
        text: whether words go to stdout as they are decoded; if not, the caller prints the result.
    """

    def __init__(self, *, text: bool) -> None:
        self._text = text
        self._shown = 0  # characters of the open segment that are on stdout
        # Where both streams share a terminal, only complete lines go to stdout: the rewritten line on
        # stderr would overwrite an incomplete one.
        self._complete_lines = sys.stdout.isatty() and shows_progress()

    def show(self, update: LiveUpdate) -> None:
        """Print the words that became final since the last update, and rewrite the line on stderr."""
        self.clear()
        if self._text:
            for segment in update.closed:
                self._print(one_line(segment.text.strip()))
                write("\n")
                sys.stdout.flush()
                self._shown = 0
            if not self._complete_lines:
                self._print(_text(update.open).rstrip(TRAILING_MARKS))
        self._rewrite(_text(update.open) if self._complete_lines or not self._text else "", update)

    def clear(self) -> None:
        """Erase the line on stderr."""
        if shows_progress():
            erase = (ControlType.ERASE_IN_LINE, 2)
            stderr.control(Control(ControlType.CARRIAGE_RETURN, erase))

    def _print(self, text: str) -> None:
        write(text[self._shown :])
        sys.stdout.flush()
        self._shown = max(self._shown, len(text))

    def _rewrite(self, final: str, update: LiveUpdate) -> None:
        if not shows_progress():
            return
        line = Text(final).append(one_line(update.tentative), style="dim")
        room = shutil.get_terminal_size().columns - 1
        stderr.print(line[max(0, len(line) - room) :], end="", soft_wrap=True, highlight=False)


def _text(words: tuple[Word, ...]) -> str:
    return one_line("".join(word.word for word in words).lstrip())
