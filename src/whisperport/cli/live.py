"""`whisperport transcribe --live`: final words on stdout as they are decoded, other output on stderr."""

import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from whisperport.audio import ReadAhead, live_audio, microphone_audio
from whisperport.bundle import Bundle
from whisperport.cli.console import print_note, print_warning, shows_progress, stderr, write
from whisperport.cli.fields import field_options
from whisperport.cli.verb import IntRange, option, together
from whisperport.errors import AudioError, IncompleteError, Interrupted
from whisperport.system.printable import one_line
from whisperport.text import Word
from whisperport.transcription import Transcriber, Transcript
from whisperport.transcription.live_options import LiveOptions
from whisperport.transcription.live_transcriber import LiveTranscriber, LiveUpdate

TRAILING_MARKS = (
    ".,!?:;…。，！？：；"  # not printed after the last final word: they may still change
)
BEHIND_S = 10.0  # seconds of audio that wait to be transcribed before a warning is printed
LIVE = "Live audio"

live_options = together(
    option(
        "--live",
        group=LIVE,
        is_flag=True,
        help="Transcribe while audio arrives: from the microphone if AUDIO is omitted, from standard "
        "input if AUDIO is -, or from a file played in real time",
    ),
    option(
        "--microphone",
        "device",
        group=LIVE,
        metavar="NAME",
        show_default="the system's default input",
        help="Microphone to use with --live: a part of its name, or its number in the list that "
        "`python -m sounddevice` prints",
    ),
    option(
        "--raw",
        "raw_rate",
        group=LIVE,
        type=IntRange(min=1),
        metavar="HZ",
        help="With --live, read AUDIO as headerless 16-bit little-endian mono samples at this sample "
        "rate, in Hz",
    ),
    field_options(LiveOptions, "step_s", group=LIVE),
)


def check_live(audio: str | None, live: bool, raw_rate: int | None, device: str | None) -> None:
    """Check the combination of the live options.

    Raises:
        click.UsageError: two of them contradict each other.
    """
    if audio is None and not live:
        raise click.UsageError("missing argument 'AUDIO'; give --live to use the microphone")
    for value, name in ((raw_rate, "--raw"), (device, "--microphone")):
        if value is not None and not live:
            raise click.UsageError(f"{name} requires --live")
    if audio is None and raw_rate is not None:
        raise click.UsageError(
            "--raw requires AUDIO, such as -; it does not apply to the microphone"
        )
    if audio is not None and device is not None:
        raise click.UsageError("--microphone and AUDIO exclude each other; give one of them")


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


def transcribe_live(
    audio: str | None,
    bundle: Bundle | Path,
    options: LiveOptions,
    screen: Screen,
    raw_rate: int | None,
    device: str | None,
) -> Transcript:
    """Transcribe until the audio ends, or until Ctrl-C.

    Args:
        audio: a path, or "-" for standard input; None: the microphone `device`, which Ctrl-C stops.
        raw_rate: sample rate in Hz of headerless samples; None: the audio has a header.
        device: number or part of the name of a microphone; None: the system's default.

    Raises:
        IncompleteError: the audio failed after a part of it was transcribed; carries that transcript.
        Interrupted: Ctrl-C before a file or pipe ended; carries the transcript until then.
        AudioError, MissingPackageError: the audio failed before any of it was transcribed.
    """
    if audio is None:  # before the model is loaded: there may be no microphone
        is_number = device is not None and device.isdecimal() and len(device) < 10
        pieces = microphone_audio(int(device) if device and is_number else device, _listening)
    else:
        pieces = live_audio(audio, raw_rate=raw_rate)
    transcriber = Transcriber(bundle, options.transcribe.run)
    live, source = LiveTranscriber(transcriber, options), ReadAhead(pieces)
    try:
        with _stopped_by_ctrl_c(source) as signals:
            failure = _feed(live, source, screen)
            screen.show(live.finish())
    except KeyboardInterrupt:  # a second Ctrl-C, while the first is handled
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
    if signals and audio is not None:
        raise Interrupted(transcript)
    return transcript


def _listening() -> None:
    print_note("listening to the microphone; press Ctrl-C to stop")


def _feed(live: LiveTranscriber, source: ReadAhead, screen: Screen) -> AudioError | None:
    """Feed audio until it ends; return the error that ended it early, if any."""
    warned = False
    try:
        while (samples := source.take()) is not None:
            if samples.size > BEHIND_S * 16_000 and not warned:
                screen.clear()
                print_warning(
                    "the model is slower than the audio: words appear late, but none is lost"
                )
                warned = True
            screen.show(live.feed(samples))
    except AudioError as error:
        return error
    return None


@contextmanager
def _stopped_by_ctrl_c(source: ReadAhead) -> Iterator[list[int]]:
    """End the audio at the first Ctrl-C and append it to the yielded list; a second one interrupts."""
    signals: list[int] = []

    def stop(signum: int, _frame: object) -> None:
        signals.append(signum)
        source.stop()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, before)


def _text(words: tuple[Word, ...]) -> str:
    return one_line("".join(word.word for word in words).lstrip())
