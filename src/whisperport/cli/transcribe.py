"""`whisperport transcribe`"""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from whisperport.bundle import Bundle
from whisperport.cli.audio_files import check_audio, with_files_of_folders
from whisperport.cli.console import (
    audio_bar,
    print_error,
    print_json,
    print_next,
    print_note,
    print_warning,
    stages,
    write,
)
from whisperport.cli.given import Given
from whisperport.cli.live import Screen, check_live, live_options, transcribe_live
from whisperport.cli.model_option import chosen_bundle, model_arguments, model_options
from whisperport.cli.options import (
    RUN_OPTIONS,
    run_option,
    run_option_arguments,
    run_options_of,
    threads,
    trust,
)
from whisperport.cli.paths import input_paths
from whisperport.cli.several_files import check_several, transcribe_several
from whisperport.cli.transcribe_options import (
    audio_options,
    check_features,
    chosen_features,
    chosen_subtitles,
    chunk_options,
    decoding_options,
    feature_options,
    subtitle_options,
    transcribe_options,
    with_chunks,
    word_options,
)
from whisperport.cli.transcript_files import (
    FORMATS,
    TranscriptFiles,
    chosen_format,
    output_options,
)
from whisperport.cli.verb import Verb, option
from whisperport.errors import IncompleteError, Interrupted
from whisperport.system import interrupts
from whisperport.system.cores import usable_cores
from whisperport.system.printable import one_line
from whisperport.text import SubtitleOptions, write_as
from whisperport.transcription import (
    FeatureOptions,
    TranscribeOptions,
    Transcript,
    transcribe_features,
)
from whisperport.transcription import (
    transcribe as run_transcribe,
)
from whisperport.transcription.live_options import LiveOptions


@click.command(
    cls=Verb,
    short_help="Transcribe audio files, live audio or a device's features.",
    target_options=RUN_OPTIONS,
)
@click.argument("files", nargs=-1, metavar="[AUDIO]...", type=Given("audio", as_text=True))
@model_options
@audio_options
@feature_options
@live_options
@option(
    "--output-format",
    "-f",
    group="Output",
    type=click.Choice(FORMATS),
    show_default="that of the file name in --output-dir, else txt",
    help="Format of the transcript: plain text, subtitles (srt, vtt), a table "
    "with times in ms (tsv), or openai-whisper's JSON",
)
@option(
    "--json",
    "as_json",
    group="Output",
    is_flag=True,
    help="Print the transcript and all its details as JSON, in place of --output-format",
)
@output_options
@word_options
@subtitle_options
@decoding_options
@chunk_options
@threads
@run_option
@trust
def transcribe(
    files: tuple[str, ...],
    bundle: Path | None,
    model: str | None,
    output_format: str | None,
    feature_files: tuple[Path, ...],
    live: bool,
    raw_rate: int | None,
    device: str | None,
    step_s: float,
    output: Path | None,
    overwrite: bool,
    vad: bool,
    pack: bool,
    workers: int,
    batch: bool,
    threads: int | None,
    run_options: tuple[str, ...],
    trust: bool,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Transcribe audio files, live audio or a device's features, and print the transcript.

    AUDIO is any audio or video file that FFmpeg reads, a folder of such files, or - for standard input.
    With --live it may be omitted: the microphone is used. With --features it is omitted: the encoder ran
    on a device, and the bundle's decoder transcribes its output. Of several files, each is printed as one
    line with its name.

    \b
    Examples:
      $ whisperport transcribe talk.mp3 --model tiny.en
      $ whisperport transcribe talk.mp3 --bundle build/tiny-xnnpack --output-format srt > talk.srt
      $ whisperport transcribe monday.mp3 tuesday.mp3 --model base --output-dir texts
      $ whisperport transcribe --live --model tiny.en
      $ whisperport transcribe --bundle build/small --features output.bin
    """
    several = len(files) > 1 or output is not None or any(map(os.path.isdir, files))
    if several and (live or feature_files or not files):
        raise click.UsageError(
            "several AUDIO files, folders and --output-dir are for audio files only"
        )
    if overwrite and output is None:
        raise click.UsageError("--overwrite requires --output-dir")
    output_format = chosen_format(output, output_format)
    files = with_files_of_folders(files)
    audio = files[0] if files else None
    stored = chosen_features(chosen)
    check_features(feature_files, stored, audio, live=live, vad=vad)
    if not feature_files:
        check_live(audio, live, raw_rate, device)
    if threads is None and workers > 1:
        threads = max(1, usable_cores() // workers)
    options = transcribe_options(chosen, run_options_of(threads, run_options, trust=trust))
    options = with_chunks(options, vad, pack, workers, batch)
    if not several:
        options.check_for_one()
    word_timestamps = options.word_timestamps or live  # a live transcript always has them
    subtitles = chosen_subtitles(chosen, "json" if as_json else output_format, word_timestamps)
    if several:
        to_write = None
        if output is not None:
            others = input_paths(click.get_current_context(), "files")
            to_write = TranscriptFiles(files, output, output_format, others, overwrite=overwrite)
        check_several(output_format, to_write, as_json=as_json)
        written = (subtitles, output_format, to_write)
        opening = partial(chosen_bundle, bundle, model)
        transcribe_several(files, opening, options, *written, as_json=as_json)
        return
    if audio is not None:
        check_audio(audio, headerless=raw_rate is not None)
    opened = chosen_bundle(bundle, model)
    if feature_files:
        job = partial(_transcribe_features, feature_files, opened, options, stored)
    elif live or audio is None:
        live_opts = LiveOptions(transcribe=options, step_s=step_s)
        screen = Screen(text=output_format == "txt" and not as_json)
        job = partial(transcribe_live, audio, opened, live_opts, screen, raw_rate, device)
    else:
        job = partial(_transcribe_file, audio, opened, options)
    transcript, failure = _run(job)
    for start in transcript.truncated:
        print_warning(
            f"the window at {start:.0f} s reached the limit of --max-tokens: the end of its text is missing"
        )
    if as_json:
        print_json(asdict(transcript))
    else:
        _print(transcript, output_format, subtitles, printed=live)
    if failure is not None:
        _print_incomplete(transcript, failure)
        sys.exit(1 if isinstance(failure, IncompleteError) else interrupts.exit_status())
    if not as_json and not feature_files:
        source = [] if audio is None else [audio]
        otherwise = ["--output-format", "srt"] if output_format == "txt" else ["--json"]
        how = ["--live"] * (live or audio is None)
        same = run_option_arguments(run_options, trust=trust)
        print_next("transcribe", *source, *how, *model_arguments(bundle, model), *same, *otherwise)


def _run(
    job: Callable[[], Transcript],
) -> tuple[Transcript, IncompleteError | Interrupted | None]:
    """The transcript, and the error that ended it early, if any.

    Raises:
        IncompleteError, Interrupted: nothing was transcribed before.
    """
    try:
        return job(), None
    except (IncompleteError, Interrupted) as early:
        if not early.transcript.segments:
            raise
        return early.transcript, early


def _transcribe_file(audio: str, bundle: Bundle | Path, options: TranscribeOptions) -> Transcript:
    with audio_bar("standard input" if audio == "-" else Path(audio).name) as bar:
        return run_transcribe(audio, bundle, options, progress=bar)


def _transcribe_features(
    files: tuple[Path, ...],
    bundle: Bundle | Path,
    options: TranscribeOptions,
    stored: FeatureOptions,
) -> Transcript:
    with stages() as progress:
        return transcribe_features(
            files, bundle, options, stored, stages=progress, recognized=print_note
        )


def _print(
    transcript: Transcript, output_format: str, subtitles: SubtitleOptions, *, printed: bool
) -> None:
    """Print the transcript on stdout; `printed`: its plain text is there already."""
    if output_format == "txt" and not printed:
        write(f"{one_line(transcript.text)}\n")
    elif output_format != "txt":
        language = transcript.language
        write(write_as(output_format, transcript.segments, language=language, options=subtitles))
    if not transcript.text:
        print_note("no speech was found in the audio")


def _print_incomplete(transcript: Transcript, failure: IncompleteError | Interrupted) -> None:
    where = f"the transcript of the first {transcript.segments[-1].end:.1f} s is on standard output"
    if isinstance(failure, IncompleteError):
        print_error(failure)
        print_note(where, important=True)
    else:
        print_note(f"interrupted: {where}", important=True)
