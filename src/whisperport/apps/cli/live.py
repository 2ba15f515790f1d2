"""`whisperport live`"""

import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from whisperport.apps.cli.audio_files import check_audio
from whisperport.apps.cli.console import (
    print_next,
    print_note,
    print_warning,
    shows_progress,
    stderr,
    write,
)
from whisperport.apps.cli.fields import field_options, field_values
from whisperport.apps.cli.given import Given
from whisperport.apps.cli.model_option import chosen_bundle, model_arguments, model_options
from whisperport.apps.cli.shared_options import (
    RUN_OPTIONS,
    adapter_option,
    run_option,
    run_option_arguments,
    run_options_of,
    short_windows,
    threads,
    trust,
)
from whisperport.apps.cli.transcribe_options import (
    chosen_subtitles,
    file_arguments,
    live_decoding_options,
    punctuation_options,
    transcribe_options,
)
from whisperport.apps.cli.transcript_output import (
    FORMATS,
    print_mismatches,
    print_transcript_of,
    transcript_json,
)
from whisperport.apps.cli.verb import IntRange, Verb, option
from whisperport.errors import Interrupted
from whisperport.program.bundle import Bundle
from whisperport.speech.audio.live_pieces import ReadAhead, live_audio
from whisperport.speech.audio.microphone import microphone_audio
from whisperport.speech.text import Segment, SubtitleOptions, Word
from whisperport.system.printable import one_line
from whisperport.transcription import Transcriber, Transcript
from whisperport.transcription.live.live import live as transcribe_live
from whisperport.transcription.live.live_options import LiveOptions
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
        self._lines = 0  # closed segments that are on stdout
        self._shown = 0  # characters of the open segment that are on stdout
        # Where both streams share a terminal, only complete lines go to stdout: the rewritten line on
        # stderr would overwrite an incomplete one.
        self._complete_lines = sys.stdout.isatty() and shows_progress()

    def show(self, update: LiveUpdate) -> None:
        """Print the words that became final since the last update, and rewrite the line on stderr."""
        self.clear()
        if self._text:
            self._print_lines(update.closed)
            if not self._complete_lines:
                self._print(_text(update.open).rstrip(TRAILING_MARKS))
        self._rewrite(_text(update.open) if self._complete_lines or not self._text else "", update)

    def end(self, transcript: Transcript) -> None:
        """Print what a transcript that was interrupted has beyond the last update."""
        self.clear()
        if self._text:
            self._print_lines(transcript.segments[self._lines :])

    def clear(self) -> None:
        """Erase the line on stderr."""
        if shows_progress():
            erase = (ControlType.ERASE_IN_LINE, 2)
            stderr.control(Control(ControlType.CARRIAGE_RETURN, erase))

    def _print_lines(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            if segment.text or segment.match is None:
                self._print(f"{one_line(segment.text.strip())}\n")
            print_mismatches([segment])
            self._lines, self._shown = self._lines + 1, 0

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


BEHIND_S = 10.0  # seconds of audio that wait to be transcribed before a warning is printed
SOURCE = "Audio"


@click.command(
    cls=Verb,
    short_help="Transcribe a microphone, a pipe or a file while the audio arrives.",
    target_options=RUN_OPTIONS,
)
@click.argument("audio", required=False, type=Given("audio", as_text=True))
@model_options
@option(
    "--microphone",
    "device",
    group=SOURCE,
    metavar="NAME",
    show_default="the system's default input",
    help="Microphone to use if AUDIO is omitted: a part of its name, or its number in the list that "
    "`python -m sounddevice` prints",
)
@option(
    "--raw",
    "raw_rate",
    group=SOURCE,
    type=IntRange(min=1),
    metavar="HZ",
    help="Read AUDIO as headerless 16-bit little-endian mono samples at this sample rate, in Hz",
)
@field_options(LiveOptions, "step_s", group=SOURCE)
@option(
    "--output-format",
    "-f",
    group="Output",
    type=click.Choice(FORMATS),
    default="txt",
    show_default=True,
    help="Format of the transcript: plain text, printed as it is decoded, or at the end subtitles (srt, "
    "vtt), a table with times in ms (tsv), or openai-whisper's JSON",
)
@transcript_json
@punctuation_options
@field_options(SubtitleOptions, group="Subtitles (need --output-format srt or vtt)")
@live_decoding_options
@threads
@run_option
@short_windows
@adapter_option
@trust
def live(
    audio: str | None,
    bundle: Path | None,
    model: str | None,
    raw_rate: int | None,
    device: str | None,
    output_format: str,
    as_json: bool,
    threads: int | None,
    run_options: tuple[str, ...],
    trust: bool,
    **chosen: Any,
) -> None:
    """Transcribe audio while it arrives, and print each word as soon as it is final.

    AUDIO is a file, which is played in real time, or - for standard input. If it is omitted, the
    microphone is used, until Ctrl-C. Words always have timestamps.

    \b
    Examples:
      $ whisperport live --model tiny.en
      $ whisperport live talk.mp3 --bundle build/tiny-xnnpack --output-format srt > talk.srt
      $ arecord -t raw -f S16_LE -r 16000 | whisperport live - --raw 16000 --model tiny.en
    """
    if audio is None and raw_rate is not None:
        raise click.UsageError(
            "--raw requires AUDIO, such as -; it does not apply to the microphone"
        )
    if audio is not None and device is not None:
        raise click.UsageError("--microphone and AUDIO exclude each other; give one of them")
    run = run_options_of(
        threads,
        run_options,
        trust=trust,
        short_windows=chosen["short_windows"],
        adapter=chosen["adapter"],
    )
    options = LiveOptions(
        transcribe=transcribe_options(chosen, run), **field_values(LiveOptions, chosen)
    )
    subtitles = chosen_subtitles(chosen, "json" if as_json else output_format, True)
    if audio is not None:
        check_audio(audio, headerless=raw_rate is not None)
    opened = chosen_bundle(bundle, model)
    screen = Screen(text=output_format == "txt" and not as_json)
    print_transcript_of(
        partial(_transcribe, audio, opened, options, screen, raw_rate, device),
        subtitles,
        output_format,
        as_json=as_json,
        printed=True,
    )
    if not as_json:
        source = [] if audio is None else [audio]
        otherwise = ["--output-format", "srt"] if output_format == "txt" else ["--json"]
        same = [*run_option_arguments(run_options, trust=trust), *file_arguments(chosen)]
        print_next("live", *source, *model_arguments(bundle, model), *same, *otherwise)


def _transcribe(
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
    source = ReadAhead(pieces)
    try:
        with _stopped_by_ctrl_c(source.stop) as signals:
            transcript = transcribe_live(
                _arrived(source, screen), transcriber, options, updated=screen.show
            )
    except Interrupted as early:  # by SIGTERM, or by a second Ctrl-C
        screen.end(early.transcript)
        raise
    finally:
        screen.clear()
    if signals and audio is not None:
        raise Interrupted(transcript)
    return transcript


def _listening() -> None:
    print_note("listening to the microphone; press Ctrl-C to stop")


def _arrived(source: ReadAhead, screen: Screen) -> Iterator[NDArray[np.float32]]:
    """Yield the audio that arrived since the last piece, and warn once if much of it waited."""
    warned = False
    while (samples := source.take()) is not None:
        if samples.size > BEHIND_S * 16_000 and not warned:
            screen.clear()
            print_warning("the model is slower than the audio: words appear late, but none is lost")
            warned = True
        yield samples


@contextmanager
def _stopped_by_ctrl_c(stop: Callable[[], None]) -> Iterator[list[int]]:
    """Call `stop` at the first Ctrl-C and append it to the yielded list; a second one interrupts."""
    signals: list[int] = []

    def stopped(signum: int, _frame: object) -> None:
        signals.append(signum)
        stop()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stopped)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, before)
