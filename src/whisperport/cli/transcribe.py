"""`whisperport transcribe`"""

import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from whisperport import interrupts
from whisperport.cli.chunk_options import chunk_options, with_chunks
from whisperport.cli.console import (
    audio_bar,
    print_error,
    print_json,
    print_next,
    print_note,
    print_warning,
    write,
)
from whisperport.cli.decoding_options import decoding_options, transcribe_options
from whisperport.cli.live import Screen, check_live, live_options, transcribe_live
from whisperport.cli.options import (
    as_json,
    run_option,
    run_option_words,
    run_options_help,
    run_options_of,
    threads,
    trust,
)
from whisperport.cli.subtitle_options import chosen_subtitles, subtitle_options
from whisperport.errors import IncompleteError, Interrupted
from whisperport.live import LiveOptions
from whisperport.text import SubtitleOptions, write_as
from whisperport.text.printable import one_line
from whisperport.transcription import TranscribeOptions, Transcript
from whisperport.transcription import transcribe as run_transcribe


@click.command(short_help="Transcribe an audio file, or live audio.", epilog=run_options_help())
@click.argument("recording", required=False)
@click.option(
    "--bundle",
    "-b",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A bundle  [default: the small model that comes with whisperport]",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["txt", "srt", "vtt", "tsv", "json"]),
    default="txt",
    show_default=True,
    help="Text alone, or with times; json as openai-whisper writes it",
)
@subtitle_options
@live_options
@decoding_options
@chunk_options
@threads
@run_option
@trust
@as_json
def transcribe(
    recording: str | None,
    bundle: Path | None,
    form: str,
    live: bool,
    raw_rate: int | None,
    device: str | None,
    step_s: float,
    vad: bool,
    workers: int,
    threads: int | None,
    run_options: tuple[str, ...],
    trust: bool,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Transcribe a recording: any file that FFmpeg reads, or - for standard input.

    \b
    Example:
      $ whisperport transcribe talk.mp3 --bundle build/tiny-xnnpack
      $ whisperport transcribe --live
    """
    check_live(recording, live, {"raw_rate": raw_rate, "device": device})
    options = transcribe_options(chosen, run_options_of(threads, run_options, trust=trust))
    options = with_chunks(options, vad, workers)
    has_words = options.word_timestamps or live  # live needs them, and has them in any case
    subtitles = chosen_subtitles(chosen, "json" if as_json else form, has_words)
    if live or recording is None:
        growing = LiveOptions(transcribe=options, step_s=step_s)
        screen = Screen(text=form == "txt" and not as_json)
        hear = partial(transcribe_live, recording, bundle, growing, screen, raw_rate, device)
    else:
        hear = partial(_with_a_bar, recording, bundle, options)
    transcript, failure = _transcribed(hear)
    for start in transcript.truncated:
        print_warning(f"the window at {start:.0f} s met the token limit; its end is missing")
    if as_json:
        print_json(asdict(transcript))
    else:
        _print(transcript, form, subtitles, said=live)
    if failure is not None:
        _print_incomplete(transcript, failure)
        sys.exit(1 if isinstance(failure, IncompleteError) else interrupts.exit_status())
    if not as_json:
        audio = [] if recording is None else [recording]
        with_bundle = [] if bundle is None else ["--bundle", str(bundle)]
        otherwise = ["--format", "srt"] if form == "txt" else ["--json"]
        how = ["--live"] * (live or recording is None)
        same = run_option_words(run_options, trust=trust)
        print_next("transcribe", *audio, *how, *with_bundle, *same, *otherwise)


def _transcribed(
    hear: Callable[[], Transcript],
) -> tuple[Transcript, IncompleteError | Interrupted | None]:
    """What was said; and what ended it early, where that was not nothing."""
    try:
        return hear(), None
    except (IncompleteError, Interrupted) as early:
        if not early.transcript.segments:
            raise
        return early.transcript, early


def _with_a_bar(recording: str, bundle: Path | None, options: TranscribeOptions) -> Transcript:
    with audio_bar("standard input" if recording == "-" else Path(recording).name) as bar:
        return run_transcribe(recording, bundle, options, progress=bar)


def _print(transcript: Transcript, form: str, subtitles: SubtitleOptions, *, said: bool) -> None:
    """The result on stdout; `said`: plain text was printed as it came."""
    if form == "txt" and not said:
        write(f"{one_line(transcript.text)}\n")
    elif form != "txt":
        language = transcript.language
        write(write_as(form, transcript.segments, language=language, options=subtitles))
    if not transcript.text:
        print_note("no speech was heard")


def _print_incomplete(transcript: Transcript, failure: IncompleteError | Interrupted) -> None:
    where = f"the text to {transcript.segments[-1].end:.1f} s is on standard output"
    if isinstance(failure, IncompleteError):
        print_error(failure)
        print_note(where)
    else:
        print_note(f"interrupted: {where}")
