"""`whisperport transcribe`"""

from dataclasses import asdict
from pathlib import Path

import click

from whisperport.cli.console import audio_bar, print_json, print_next, print_note, print_warning
from whisperport.cli.options import as_json, run_option, run_options_of, threads
from whisperport.runtime import TEMPERATURES, DecodeOptions
from whisperport.text import write_as
from whisperport.transcription import TranscribeOptions
from whisperport.transcription import transcribe as run_transcribe


@click.command(short_help="Transcribe a recording: any file that FFmpeg reads.")
@click.argument("recording")
@click.option(
    "--bundle",
    "-b",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A bundle  [default: the small model that comes with whisperport]",
)
@click.option("--language", metavar="CODE", help="Such as en or de  [default: detected]")
@click.option(
    "--task",
    type=click.Choice(["transcribe", "translate"]),
    default="transcribe",
    show_default=True,
    help="translate: to English",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["txt", "srt", "vtt", "tsv"]),
    default="txt",
    show_default=True,
    help="Text alone, or with times",
)
@click.option("--words", is_flag=True, help="Times of words as well; `--json` shows them")
@click.option("--beam-size", type=click.IntRange(min=1), help="Beams  [default: none, greedy]")
@click.option(
    "--temperature",
    "temperatures",
    type=click.FloatRange(0, 10),
    multiple=True,
    help="Tried in order until a window does not fail; may be repeated  [default: 0 to 1 by 0.2]",
)
@click.option(
    "--initial-prompt", default="", metavar="TEXT", help="As if said before the recording"
)
@click.option(
    "--condition-on-previous-text/--no-condition-on-previous-text",
    default=True,
    show_default=True,
    help="What was said is the prompt of what follows",
)
@click.option(
    "--clip",
    "clips",
    type=(click.FloatRange(min=0), click.FloatRange(min=0)),
    multiple=True,
    metavar="START END",
    help="Transcribe only these seconds; may be repeated",
)
@threads
@run_option
@as_json
def transcribe(
    recording: str,
    bundle: Path | None,
    language: str | None,
    task: str,
    form: str,
    words: bool,
    beam_size: int | None,
    temperatures: tuple[float, ...],
    initial_prompt: str,
    condition_on_previous_text: bool,
    clips: tuple[tuple[float, float], ...],
    threads: int | None,
    run_options: tuple[str, ...],
    as_json: bool,
) -> None:
    """Transcribe a recording: any file that FFmpeg reads, or - for standard input.

    \b
    Example:
      $ whisperport transcribe talk.mp3 --bundle build/tiny-xnnpack
    """
    options = TranscribeOptions(
        decode=DecodeOptions(language=language, task=task, beam_size=beam_size),
        run=run_options_of(threads, run_options),
        temperatures=temperatures or TEMPERATURES,
        initial_prompt=initial_prompt,
        condition_on_previous_text=condition_on_previous_text,
        clips=tuple(second for clip in clips for second in clip),
        word_timestamps=words,
    )
    with audio_bar("standard input" if recording == "-" else Path(recording).name) as bar:
        transcript = run_transcribe(recording, bundle, options, progress=bar)
    for start in transcript.truncated:
        print_warning(f"the window at {start:.0f} s met the token limit; its end is missing")
    if as_json:
        print_json(asdict(transcript))
        return
    if form == "txt":
        print(transcript.text)
    else:
        print(write_as(form, transcript.segments), end="")
    if not transcript.segments:
        print_note("no speech was heard")
    with_bundle = "" if bundle is None else f" --bundle {bundle}"
    otherwise = "--format srt" if form == "txt" else "--json"
    print_next(f"whisperport transcribe {recording}{with_bundle} {otherwise}")
