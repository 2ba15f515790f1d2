"""The options of `whisperport transcribe` that say how to decode, with openai-whisper's defaults."""

import math
from collections.abc import Callable
from typing import Any

import click

from whisperport.runtime import TEMPERATURES, DecodeOptions, Thresholds
from whisperport.runtime.words import APPENDED, PREPENDED
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions

Command = Callable[..., None]


def number_or_none(value: str | float) -> float | None:
    """A number, or `none` for no limit.

    Raises:
        click.BadParameter: neither.
    """
    if value == "none":
        return None
    try:
        return float(value)
    except ValueError:
        raise click.BadParameter(f"expected a number, or none; got {value!r}") from None


def token_ids(value: str) -> tuple[int, ...]:
    """Ids with commas between.

    Raises:
        click.BadParameter: one is no integer.
    """
    try:
        return tuple(int(piece) for piece in value.split(",") if piece.strip())
    except ValueError:
        raise click.BadParameter(f"expected ids with commas between; got {value!r}") from None


WHAT = (
    click.option(
        "--language",
        metavar="NAME",
        help="Such as en or German  [default: the checkpoint's own, or detected]",
    ),
    click.option(
        "--task",
        type=click.Choice(["transcribe", "translate"]),
        default="transcribe",
        show_default=True,
        help="translate: to English",
    ),
    click.option(
        "--clip",
        "clips",
        type=(click.FloatRange(min=0), click.FloatRange(min=0)),
        multiple=True,
        metavar="START END",
        help="Transcribe only these seconds; END may be inf; may be repeated",
    ),
    click.option(
        "--words", is_flag=True, help="Times of words as well: in json, and subtitles follow them"
    ),
    click.option(
        "--timestamps/--no-timestamps",
        default=True,
        show_default=True,
        help="Ask the model for times; without, a window is one segment",
    ),
)
SEARCH = (
    click.option("--beam-size", type=click.IntRange(min=1), help="Beams  [default: none, greedy]"),
    click.option(
        "--patience", type=click.FloatRange(0.1, 100), help="Of the beam search  [default: 1]"
    ),
    click.option(
        "--length-penalty",
        type=click.FloatRange(0, 1),
        help="Alpha, when beams are compared  [default: by length alone]",
    ),
    click.option(
        "--temperature",
        "temperatures",
        type=click.FloatRange(0, 10),
        multiple=True,
        help="Tried in order until a window does not fail; may be repeated  [default: 0 to 1 by 0.2]",
    ),
    click.option(
        "--best-of",
        type=click.IntRange(min=1),
        help="Drawn paths at temperatures above 0  [default: 1]",
    ),
    click.option(
        "--max-tokens",
        type=click.IntRange(min=1),
        help="In a window  [default: half of the decoder's positions]",
    ),
)
PROMPT = (
    click.option(
        "--initial-prompt", default="", metavar="TEXT", help="As if said before the recording"
    ),
    click.option(
        "--carry-initial-prompt", is_flag=True, help="As if said before every window as well"
    ),
    click.option(
        "--condition-on-previous-text/--no-condition-on-previous-text",
        default=None,
        show_default="yes, but not in a short window",
        help="What was said is the prompt of what follows",
    ),
    click.option(
        "--prefix", default="", metavar="TEXT", help="With which every window begins; not shown"
    ),
)
RULES = (
    click.option(
        "--suppress-tokens",
        type=token_ids,
        default="-1",
        metavar="IDS",
        help='Never said, with commas between; -1: the checkpoint\'s list, "": none  [default: -1]',
    ),
    click.option(
        "--suppress-blank/--no-suppress-blank",
        default=True,
        show_default=True,
        help="No window begins with a blank",
    ),
    click.option(
        "--max-initial-timestamp",
        type=number_or_none,
        metavar="NUMBER",
        default=1.0,
        show_default=True,
        help="The first time in a window is at most this, in seconds, or none",
    ),
    click.option(
        "--repetition-penalty",
        type=click.FloatRange(1, 10),
        show_default="1, and 1.1 in a short window",
        help="Above 1: what a window has said becomes less probable",
    ),
    click.option(
        "--no-repeat-ngram-size",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="No window says so many tokens in a row twice; 0: it may",
    ),
)
FAILURE = (
    click.option(
        "--compression-ratio-threshold",
        type=number_or_none,
        metavar="NUMBER",
        default=2.4,
        show_default=True,
        help="A window whose text is more compressible failed, or none",
    ),
    click.option(
        "--logprob-threshold",
        type=number_or_none,
        metavar="NUMBER",
        default=-1.0,
        show_default=True,
        help="A window less probable per token failed, or none",
    ),
    click.option(
        "--no-speech-threshold",
        type=number_or_none,
        metavar="NUMBER",
        default=0.6,
        show_default=True,
        help="More probably no speech, and failed: silence, or none",
    ),
    click.option(
        "--hallucination-silence-threshold",
        type=number_or_none,
        metavar="NUMBER",
        help="With `--words`: skip longer silences, in seconds, around what seems made up",
    ),
)
PUNCTUATION = (
    click.option(
        "--prepend-punctuations",
        default=PREPENDED,
        metavar="MARKS",
        help="With `--words`: marks joined to the next word",
    ),
    click.option(
        "--append-punctuations",
        default=APPENDED,
        metavar="MARKS",
        help="With `--words`: marks joined to the word before",
    ),
)


def decoding_options(command: Command) -> Command:
    """Add them all, in this order."""
    for option in reversed((*WHAT, *SEARCH, *PROMPT, *RULES, *FAILURE, *PUNCTUATION)):
        command = option(command)
    return command


def transcribe_options(chosen: dict[str, Any], run: RunOptions) -> TranscribeOptions:
    """What was chosen, by the names of the options.

    Raises:
        UsageError: a value out of its range, or one that needs another.
    """
    decode = DecodeOptions(
        **{
            name: chosen[name]
            for name in (
                *("language", "task", "timestamps", "max_tokens", "best_of", "beam_size"),
                *("patience", "length_penalty", "suppress_tokens", "suppress_blank"),
                *("max_initial_timestamp", "repetition_penalty", "no_repeat_ngram_size"),
            )
        }
    )
    return TranscribeOptions(
        decode=decode,
        run=run,
        temperatures=chosen["temperatures"] or TEMPERATURES,
        thresholds=Thresholds(
            compression_ratio=chosen["compression_ratio_threshold"],
            logprob=chosen["logprob_threshold"],
            no_speech=chosen["no_speech_threshold"],
        ),
        clips=_clip_times(chosen["clips"]),
        word_timestamps=chosen["words"],
        **{
            name: chosen[name]
            for name in (
                *("initial_prompt", "carry_initial_prompt", "condition_on_previous_text"),
                *("prefix", "hallucination_silence_threshold"),
                *("prepend_punctuations", "append_punctuations"),
            )
        },
    )


def _clip_times(clips: tuple[tuple[float, float], ...]) -> tuple[float, ...]:
    """Start, end, start, …; the last end left out where it is infinite."""
    times = tuple(second for clip in clips for second in clip)
    return times[:-1] if times[-1:] == (math.inf,) else times
