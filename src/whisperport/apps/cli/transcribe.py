"""`whisperport transcribe`"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import click

from whisperport.apps.cli.audio_files import check_audio, with_files_of_folders
from whisperport.apps.cli.console import audio_bar, print_next, print_note, stages
from whisperport.apps.cli.given import Given
from whisperport.apps.cli.model_option import chosen_bundle, model_arguments, model_options
from whisperport.apps.cli.paths import input_paths
from whisperport.apps.cli.several_files import check_several, transcribe_several
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
    audio_options,
    check_features,
    chosen_features,
    chosen_subtitles,
    chunk_options,
    decoding_options,
    feature_options,
    file_arguments,
    subtitle_options,
    transcribe_options,
    with_speech_chunks,
    word_options,
)
from whisperport.apps.cli.transcript_output import (
    FORMATS,
    TranscriptFiles,
    chosen_format,
    output_options,
    print_transcript_of,
    transcript_json,
)
from whisperport.apps.cli.verb import Verb, option
from whisperport.program.bundle import Bundle
from whisperport.system.machine import usable_cores
from whisperport.transcription import TranscribeOptions, Transcript
from whisperport.transcription import transcribe as run_transcribe
from whisperport.transcription.feature_files import FeatureOptions, transcribe_features


@click.command(
    cls=Verb,
    short_help="Transcribe audio files or a device's features.",
    target_options=RUN_OPTIONS,
)
@click.argument("files", nargs=-1, metavar="[AUDIO]...", type=Given("audio", as_text=True))
@model_options
@audio_options
@feature_options
@option(
    "--output-format",
    "-f",
    group="Output",
    type=click.Choice(FORMATS),
    show_default="that of the file name in --output-dir, else txt",
    help="Format of the transcript: plain text, subtitles (srt, vtt), a table "
    "with times in ms (tsv), or openai-whisper's JSON",
)
@transcript_json
@output_options
@word_options
@subtitle_options
@decoding_options
@chunk_options
@threads
@run_option
@short_windows
@adapter_option
@trust
def transcribe(
    files: tuple[str, ...],
    bundle: Path | None,
    model: str | None,
    output_format: str | None,
    feature_files: tuple[Path, ...],
    output: Path | None,
    threads: int | None,
    run_options: tuple[str, ...],
    trust: bool,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Transcribe audio files or a device's features, and print the transcript.

    AUDIO is any audio or video file that FFmpeg reads, a folder of such files, or - for standard input.
    With --features it is omitted: the encoder ran on a device, and the bundle's decoder transcribes its
    output. Of several files, each is printed as one line with its name. `whisperport live` transcribes
    while audio arrives.

    \b
    Examples:
      $ whisperport transcribe talk.mp3 --model tiny.en
      $ whisperport transcribe talk.mp3 --bundle build/tiny-xnnpack --output-format srt > talk.srt
      $ whisperport transcribe monday.mp3 tuesday.mp3 --model base --output-dir texts
      $ whisperport transcribe --bundle build/small --features output.bin
    """
    stored = chosen_features(chosen)
    check_features(feature_files, stored, files, output, vad=chosen["vad"])
    if chosen["overwrite"] and output is None:
        raise click.UsageError("--overwrite requires --output-dir")
    several = len(files) > 1 or output is not None or any(map(os.path.isdir, files))
    output_format = chosen_format(output, output_format)
    files = with_files_of_folders(files)
    if threads is None and chosen["workers"] > 1:
        threads = max(1, usable_cores() // chosen["workers"])
    options = transcribe_options(
        chosen,
        run_options_of(
            threads,
            run_options,
            trust=trust,
            short_windows=chosen["short_windows"],
            adapter=chosen["adapter"],
        ),
    )
    options = with_speech_chunks(options, chosen)
    if not several:
        options.check_for_one()
    subtitles = chosen_subtitles(
        chosen, "json" if as_json else output_format, options.word_timestamps
    )
    if several:
        to_write = None
        if output is not None:
            inputs = input_paths(click.get_current_context(), "files")
            to_write = TranscriptFiles(
                files, output, output_format, inputs, overwrite=chosen["overwrite"]
            )
        check_several(output_format, to_write, as_json=as_json)
        written = (subtitles, output_format, to_write)
        opening = partial(chosen_bundle, bundle, model)
        transcribe_several(files, opening, options, *written, as_json=as_json)
        return
    for audio in files:
        check_audio(audio)
    opened = chosen_bundle(bundle, model)
    if feature_files:
        job = partial(_transcribe_features, feature_files, opened, options, stored)
    else:
        job = partial(_transcribe_file, files[0], opened, options)
    print_transcript_of(job, subtitles, output_format, as_json=as_json)
    if not as_json and not feature_files:
        otherwise = ["--output-format", "srt"] if output_format == "txt" else ["--json"]
        same = [*run_option_arguments(run_options, trust=trust), *file_arguments(chosen)]
        print_next("transcribe", *files, *model_arguments(bundle, model), *same, *otherwise)


def _transcribe_file(audio: str, bundle: Bundle | Path, options: TranscribeOptions) -> Transcript:
    with audio_bar("standard input" if audio == "-" else Path(audio).name) as bar:
        return run_transcribe(audio, bundle, options, progress=bar)


def _transcribe_features(
    files: tuple[Path, ...],
    bundle: Bundle | Path,
    options: TranscribeOptions,
    stored: FeatureOptions,
) -> Transcript:
    with stages():
        return transcribe_features(files, bundle, options, stored, recognized=print_note)
