"""`whisperport transcribe --live`: certain words on stdout as they come, the rest on stderr."""

import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from whisperport.audio import ReadAhead, live_audio, microphone_audio
from whisperport.cli.console import print_note, print_warning, stderr, write
from whisperport.errors import AudioError, IncompleteError, Interrupted
from whisperport.live import LiveOptions, LiveTranscriber, LiveUpdate
from whisperport.text import Word
from whisperport.text.printable import one_line
from whisperport.transcription import Transcriber, Transcript

MAY_CHANGE = ".,!?:;…。，！？：；"  # after the last certain word, until the next one is
BEHIND_S = 10.0  # seconds of sound waiting at once, worth a warning

OPTIONS = (
    click.option(
        "--live",
        is_flag=True,
        help="Words as they are said: of the microphone, of - as it grows, or of a file played",
    ),
    click.option(
        "--raw",
        "raw_rate",
        type=click.IntRange(min=1),
        metavar="HZ",
        help="With --live: the sound is 16-bit mono samples at this rate, without a header",
    ),
    click.option(
        "--microphone",
        "device",
        metavar="NAME",
        help="With --live: part of its name, or its number  [default: the system's]",
    ),
    click.option(
        "--step",
        "step_s",
        type=click.FloatRange(0.1, 10),
        default=LiveOptions().step_s,
        show_default=True,
        metavar="SECONDS",
        help="With --live: new sound from one pass to the next; less delay, or less work",
    ),
)


def live_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of a live transcription."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def check_live(recording: str | None, live: bool, given: dict[str, Any]) -> None:
    """Raises click.UsageError where the options contradict each other."""
    if recording is None and not live:
        raise click.UsageError("Missing argument 'RECORDING'; the microphone needs --live")
    for name, option in (("raw_rate", "--raw"), ("device", "--microphone")):
        if given[name] is not None and not live:
            raise click.UsageError(f"{option} needs --live")
    if recording is None and given["raw_rate"] is not None:
        raise click.UsageError("--raw is for a RECORDING, such as -, and not for the microphone")
    if recording is not None and given["device"] is not None:
        raise click.UsageError("--microphone and a RECORDING are two sounds; give one")


class Screen:
    """Certain words on stdout, a line a segment; a line on stderr that is rewritten.

    Args:
        text: whether words go to stdout at all; otherwise the result is written at the end.
    """

    def __init__(self, *, text: bool) -> None:
        self._text = text
        self._shown = 0  # characters of the open segment that are on stdout
        # On one terminal the line that is rewritten would be the line that is written.
        self._whole_lines = sys.stdout.isatty() and stderr.is_terminal

    def show(self, update: LiveUpdate) -> None:
        self.clear()
        if self._text:
            for segment in update.closed:
                self._print(one_line(segment.text.strip()))
                write("\n")
                sys.stdout.flush()
                self._shown = 0
            if not self._whole_lines:
                self._print(_text(update.open).rstrip(MAY_CHANGE))
        self._rewrite(_text(update.open) if self._whole_lines or not self._text else "", update)

    def clear(self) -> None:
        """Take the line on stderr away."""
        if stderr.is_terminal:
            erase = (ControlType.ERASE_IN_LINE, 2)
            stderr.control(Control(ControlType.CARRIAGE_RETURN, erase))

    def _print(self, text: str) -> None:
        write(text[self._shown :])
        sys.stdout.flush()
        self._shown = max(self._shown, len(text))

    def _rewrite(self, certain: str, update: LiveUpdate) -> None:
        if not stderr.is_terminal:
            return
        line = Text(certain).append(one_line(update.tentative), style="dim")
        room = shutil.get_terminal_size().columns - 1
        stderr.print(line[max(0, len(line) - room) :], end="", soft_wrap=True, highlight=False)


def transcribe_live(
    recording: str | None,
    bundle: Path | None,
    options: LiveOptions,
    screen: Screen,
    raw_rate: int | None,
    device: str | None,
) -> Transcript:
    """Transcribe until the sound ends, or until Ctrl-C.

    Args:
        recording: a path or "-"; None: the microphone `device`, for which Ctrl-C is the way to end.

    Raises:
        IncompleteError: the sound failed after some of it was heard; has what was said until then.
        Interrupted: Ctrl-C, where the sound would have gone on by itself; likewise.
        AudioError, MissingPackageError: the sound failed before any was heard.
    """
    transcriber = Transcriber(bundle, options.transcribe.run)
    if recording is None:
        is_number = device is not None and device.isdecimal() and len(device) < 10
        pieces = microphone_audio(int(device) if device and is_number else device)
        print_note("listening; Ctrl-C to stop")
    else:
        pieces = live_audio(recording, raw_rate=raw_rate)
    live, source = LiveTranscriber(transcriber, options), ReadAhead(pieces)
    try:
        with _stopped_by_ctrl_c(source) as stopped:
            failure = _listen(live, source, screen)
            screen.show(live.finish())
    except KeyboardInterrupt:  # a second one, while the first was being served
        raise Interrupted(live.transcript()) from None
    finally:
        screen.clear()
    transcript = live.transcript()
    if failure is not None:
        if not transcript.duration_s:
            raise failure
        raise IncompleteError(
            failure.what, transcript, why=failure.why, hint=failure.hint
        ) from failure
    if stopped and recording is not None:
        raise Interrupted(transcript)
    return transcript


def _listen(live: LiveTranscriber, source: ReadAhead, screen: Screen) -> AudioError | None:
    """Feed what comes until it ends; returns what ended it early."""
    warned = False
    try:
        while (samples := source.take()) is not None:
            if samples.size > BEHIND_S * 16_000 and not warned:
                screen.clear()
                print_warning("the model is slower than the sound: words come late, none is lost")
                warned = True
            screen.show(live.feed(samples))
    except AudioError as error:
        return error
    return None


@contextmanager
def _stopped_by_ctrl_c(source: ReadAhead) -> Iterator[list[int]]:
    """The first Ctrl-C ends the sound, and is noted in the list given; a second one is as ever."""
    stopped: list[int] = []

    def stop(signum: int, _frame: object) -> None:
        stopped.append(signum)
        source.stop()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def _text(words: tuple[Word, ...]) -> str:
    return one_line("".join(word.word for word in words).lstrip())
