"""The decoding options of `whisperport transcribe`, with openai-whisper's names and defaults."""

from typing import Any

import click

from whisperport.cli.verb import FloatRange, IntRange, option, together
from whisperport.runtime import TEMPERATURES, DecodeOptions, Thresholds
from whisperport.runtime.words import APPENDED, PREPENDED
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions

AUDIO = "Audio"
DECODING = "Decoding"
PROMPT = "Prompt"
FALLBACK = "Fallback (when a window is decoded again, or skipped as silence)"
WORDS = "Word timestamps"


def number_or_none(value: str | float) -> float | None:
    """Parse a number, or `none` for no limit.

    Raises:
        click.BadParameter: the value is neither.
    """
    if value == "none":
        return None
    try:
        return float(value)
    except ValueError:
        raise click.BadParameter(f"expected a number or none, got {value!r}") from None


def token_ids(value: str) -> tuple[int, ...]:
    """Parse token ids separated by commas.

    Raises:
        click.BadParameter: a part is not an integer.
    """
    try:
        return tuple(int(piece) for piece in value.split(",") if piece.strip())
    except ValueError:
        raise click.BadParameter(f"expected token ids separated by commas, got {value!r}") from None


def clip_timestamps(value: str) -> tuple[float, ...]:
    """Parse seconds separated by commas.

    Raises:
        click.BadParameter: a part is not a number.
    """
    try:
        return tuple(float(piece) for piece in value.split(",") if piece.strip())
    except ValueError:
        raise click.BadParameter(f"expected seconds separated by commas, got {value!r}") from None


audio_options = together(
    option(
        "--clip-timestamps",
        group=AUDIO,
        type=clip_timestamps,
        default="",
        metavar="START,END,...",
        show_default="all of AUDIO",
        help="Transcribe only the audio between each START and END, in seconds. Without the last "
        "END, the last clip ends where AUDIO ends",
    ),
)
decoding_options = together(
    option(
        "--language",
        group=DECODING,
        metavar="LANGUAGE",
        show_default="the checkpoint's own language if it has one, else detected",
        help="Language spoken in the audio, as a name or a code, such as German or de",
    ),
    option(
        "--task",
        group=DECODING,
        type=click.Choice(["transcribe", "translate"]),
        default="transcribe",
        show_default=True,
        help="Write the text in the spoken language (transcribe) or in English (translate)",
    ),
    option(
        "--without-timestamps",
        group=DECODING,
        is_flag=True,
        help="Do not let the model emit timestamps; each window is then one segment",
    ),
    option(
        "--max-tokens",
        group=DECODING,
        type=IntRange(1, 1000),
        metavar="N",
        show_default="half the decoder's context, 224",
        help="Maximum number of tokens decoded per window. The decoder's context, 448, also limits it",
    ),
    option(
        "--temperature",
        "temperatures",
        group=DECODING,
        type=FloatRange(0, 10),
        multiple=True,
        metavar="NUMBER",
        show_default="0, then 0.2, 0.4, 0.6, 0.8, 1",
        help="Sampling temperature; 0 picks the most probable token. Repeat the option to list the "
        "temperatures that are tried in order until a window passes the thresholds under Fallback",
    ),
    option(
        "--beam-size",
        group=DECODING,
        type=IntRange(1, 1000),
        metavar="N",
        show_default="no beam search",
        help="Number of beams in beam search. Used at temperature 0 only",
    ),
    option(
        "--patience",
        group=DECODING,
        type=FloatRange(0.1, 100),
        metavar="NUMBER",
        show_default="1",
        help="Patience factor of beam search: the search ends when --beam-size times this many "
        "candidates are complete. Requires --beam-size",
    ),
    option(
        "--length-penalty",
        group=DECODING,
        type=FloatRange(0, 1),
        metavar="NUMBER",
        show_default="none: by log-probability / tokens",
        help="Rank candidates of beam search or sampling by log-probability / ((5 + tokens) / 6)^A; this "
        "is A",
    ),
    option(
        "--best-of",
        group=DECODING,
        type=IntRange(1, 1000),
        metavar="N",
        show_default="1",
        help="Number of samples drawn per window, of which the most probable is kept. Used at "
        "temperatures above 0 only",
    ),
    option(
        "--suppress-tokens",
        group=DECODING,
        type=token_ids,
        default="-1",
        show_default=True,
        metavar="IDS",
        help="Token ids that are never emitted, separated by commas. -1 stands for the checkpoint's "
        'own list; "" suppresses none',
    ),
    option(
        "--suppress-blank/--no-suppress-blank",
        group=DECODING,
        default=True,
        show_default=True,
        help="Forbid a lone space and the end of the text as the first token of a window",
    ),
    option(
        "--max-initial-timestamp",
        group=DECODING,
        type=number_or_none,
        metavar="SECONDS",
        default=1.0,
        show_default="1; values: 0 to 30, or none",
        help="Latest position in a window at which its first segment may start; `none` sets no limit",
    ),
    option(
        "--repetition-penalty",
        group=DECODING,
        type=FloatRange(1, 10),
        metavar="NUMBER",
        show_default="1, or 1.1 if the bundle's window is shorter than the checkpoint's 30 s",
        help="Factor that makes tokens already emitted in a window less probable; 1 changes nothing",
    ),
    option(
        "--no-repeat-ngram-size",
        group=DECODING,
        type=IntRange(0, 1000),
        metavar="N",
        default=0,
        show_default=True,
        help="No sequence of N tokens may occur twice in a window; 0 turns this off",
    ),
    option(
        "--initial-prompt",
        group=PROMPT,
        default="",
        metavar="TEXT",
        help="Text given to the model as if it preceded the audio, for names and style",
    ),
    option(
        "--carry-initial-prompt",
        group=PROMPT,
        is_flag=True,
        help="Give the text of --initial-prompt to every window, not to the first only",
    ),
    option(
        "--condition-on-previous-text/--no-condition-on-previous-text",
        group=PROMPT,
        default=None,
        show_default="on, or off if the bundle's window is shorter than the checkpoint's 30 s",
        help="Use the previous window's text as the prompt of the next",
    ),
    option(
        "--prefix",
        group=PROMPT,
        default="",
        metavar="TEXT",
        help="Text that every window's transcript must begin with; omitted from the output",
    ),
    option(
        "--compression-ratio-threshold",
        group=FALLBACK,
        type=number_or_none,
        metavar="NUMBER",
        default=2.4,
        show_default="2.4; values: 0 to 1000, or none",
        help="Decode a window again at the next temperature if the zlib compression ratio of its text "
        "is above this, a sign of repetition; `none` turns this off",
    ),
    option(
        "--logprob-threshold",
        group=FALLBACK,
        type=number_or_none,
        metavar="NUMBER",
        default=-1.0,
        show_default="-1; values: -1000 to 0, or none",
        help="Decode a window again at the next temperature if the average log-probability of its "
        "tokens is below this; `none` turns this off",
    ),
    option(
        "--no-speech-threshold",
        group=FALLBACK,
        type=number_or_none,
        metavar="NUMBER",
        default=0.6,
        show_default="0.6; values: 0 to 1, or none",
        help="Skip a window as silence if the probability of no speech is above this and the average "
        "log-probability is below --logprob-threshold; `none` turns this off",
    ),
    option(
        "--hallucination-silence-threshold",
        group=FALLBACK,
        type=number_or_none,
        metavar="SECONDS",
        show_default="none; values: 0 to 1000, or none",
        help="Drop text that is probably a hallucination if silence longer than this is before or after "
        "it. Requires --word-timestamps",
    ),
)
word_options = together(
    option(
        "--word-timestamps",
        group=WORDS,
        is_flag=True,
        help="Compute the start and end of every word, for --json, --output-format json and subtitles",
    ),
    option(
        "--prepend-punctuations",
        group=WORDS,
        default=PREPENDED,
        metavar="MARKS",
        show_default=f"`{PREPENDED}`",
        help="Punctuation marks that are joined to the next word. Used with --word-timestamps",
    ),
    option(
        "--append-punctuations",
        group=WORDS,
        default=APPENDED,
        metavar="MARKS",
        show_default=f"`{APPENDED}`",
        help="Punctuation marks that are joined to the previous word. Used with --word-timestamps",
    ),
)


def transcribe_options(chosen: dict[str, Any], run: RunOptions) -> TranscribeOptions:
    """The options object made of the chosen values.

    Args:
        chosen: values by parameter name, as click parsed them.

    Raises:
        UsageError: a value is out of its range, or needs another option.
    """
    decode = DecodeOptions(
        **{
            name: chosen[name]
            for name in (
                *("language", "task", "without_timestamps", "max_tokens", "best_of", "beam_size"),
                *("patience", "length_penalty", "suppress_tokens", "suppress_blank"),
                *("max_initial_timestamp", "repetition_penalty", "no_repeat_ngram_size"),
            )
        },
    )
    return TranscribeOptions(
        decode=decode,
        run=run,
        temperatures=chosen["temperatures"] or TEMPERATURES,
        thresholds=Thresholds(
            compression_ratio_threshold=chosen["compression_ratio_threshold"],
            logprob_threshold=chosen["logprob_threshold"],
            no_speech_threshold=chosen["no_speech_threshold"],
        ),
        **{
            name: chosen[name]
            for name in (
                *("clip_timestamps", "initial_prompt", "carry_initial_prompt"),
                *(
                    "condition_on_previous_text",
                    "prefix",
                    "word_timestamps",
                    "hallucination_silence_threshold",
                ),
                *("prepend_punctuations", "append_punctuations"),
            )
        },
    )
