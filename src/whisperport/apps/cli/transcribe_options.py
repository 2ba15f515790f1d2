"""The options of `whisperport transcribe`: decoding, subtitles (as in openai-whisper), and features."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from whisperport.apps.cli.console import print_warning
from whisperport.apps.cli.fields import field_options, field_values
from whisperport.apps.cli.given import InputPath
from whisperport.apps.cli.verb import option, together
from whisperport.errors import UsageError
from whisperport.runtime import DecodeOptions, Thresholds
from whisperport.runtime.decoding.gbnf import read_grammar
from whisperport.runtime.decoding.phrases import read_phrases
from whisperport.speech.audio import VadOptions
from whisperport.speech.text import SubtitleOptions
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions
from whisperport.transcription.feature_files import FeatureOptions
from whisperport.verification.diagnosis.stored_features import FeatureStorage

DECODING = "Decoding"
PROMPT = "Prompt"
GRAMMAR = "Grammar"
FALLBACK = "Fallback (when a window is decoded again, or skipped as silence)"

audio_options = field_options(TranscribeOptions, "clip_timestamps", group="Audio")
WORDS = "Word timestamps"
punctuation_options = field_options(
    TranscribeOptions, "prepend_punctuations", "append_punctuations", group=WORDS
)
word_options = together(
    field_options(TranscribeOptions, "word_timestamps", group=WORDS), punctuation_options
)
phrases_option = option(
    "--phrases",
    "phrases_file",
    group=PROMPT,
    type=InputPath(dir_okay=False),
    metavar="FILE",
    help="Prefer the words and phrases in FILE, such as names: one per line, and behind a tab its bonus in "
    "nats per token, 0.8 if it has none",
)
grammar_options = together(
    option(
        "--grammar",
        "grammar_file",
        group=GRAMMAR,
        type=InputPath(dir_okay=False),
        metavar="FILE",
        help="Write only sentences of the grammar in FILE, in GBNF, the format of llama.cpp. "
        "Other speech has no text, but a note `no match` with its score; in JSON, the member `match`",
    ),
    field_options(TranscribeOptions, "grammar_threshold", group=GRAMMAR),
)
live_decoding_options = together(  # the others need the complete audio, or fixed windows
    field_options(DecodeOptions, group=DECODING),
    field_options(TranscribeOptions, "temperatures", group=DECODING),
    field_options(
        TranscribeOptions,
        *("initial_prompt", "carry_initial_prompt", "condition_on_previous_text"),
        group=PROMPT,
    ),
    phrases_option,
    grammar_options,
    field_options(Thresholds, group=FALLBACK),
)
decoding_options = together(
    live_decoding_options,
    field_options(TranscribeOptions, "prefix", group=PROMPT),
    field_options(TranscribeOptions, "hallucination_silence_threshold", group=FALLBACK),
)


vad_options = together(
    option(
        "--vad",
        group="Audio",
        is_flag=True,
        help="Find speech with a voice activity detector and transcribe only the speech chunks",
    ),
    option(
        "--pack",
        group="Audio",
        is_flag=True,
        help="Shorten silence so that each window holds as much speech as possible; requires --vad. Fewer "
        "windows are computed. A model for short utterances makes more errors",
    ),
)
chunk_options = together(
    vad_options, field_options(TranscribeOptions, "workers", "batch", group="Runtime")
)


def file_arguments(chosen: Mapping[str, Any]) -> list[str]:
    """The command-line arguments that repeat the given `--adapter`, `--phrases` and `--grammar`."""
    files = {"adapter": "adapter", "phrases": "phrases_file", "grammar": "grammar_file"}
    repeated = {name: chosen[key] for name, key in files.items() if chosen[key] is not None}
    return [word for name, path in repeated.items() for word in (f"--{name}", str(path))]


def transcribe_options(chosen: dict[str, Any], run: RunOptions) -> TranscribeOptions:
    """The options object made of the chosen values.

    Args:
        chosen: values by parameter name, as click parsed them.

    Raises:
        UsageError: a value is out of its range, or needs another option.
    """
    return TranscribeOptions(
        decode=DecodeOptions(**field_values(DecodeOptions, chosen)),
        run=run,
        thresholds=Thresholds(**field_values(Thresholds, chosen)),
        phrases=read_phrases(path) if (path := chosen["phrases_file"]) else (),
        grammar=read_grammar(path) if (path := chosen["grammar_file"]) else "",
        **field_values(TranscribeOptions, chosen),
    )


def with_speech_chunks(options: TranscribeOptions, chosen: dict[str, Any]) -> TranscribeOptions:
    """The options with `--vad` and `--pack` applied, among the chosen values.

    Raises:
        UsageError: `--pack` without `--vad`, or clips together with `--vad`.
    """
    vad, pack = chosen["vad"], chosen["pack"]
    if pack and not vad:
        raise UsageError(
            "`--pack` requires `--vad`",
            why="without speech chunks, each window begins where the one before it ended",
            hint="add `--vad`",
        )
    source = click.get_current_context().get_parameter_source("condition_on_previous_text")
    if vad and source is ParameterSource.COMMANDLINE and options.condition_on_previous_text:
        print_warning("with --vad, the previous text is used as a prompt within its own chunk only")
    return replace(options, vad=VadOptions(pack=pack) if vad else None)


SUBTITLES = "Subtitles (need --output-format srt or vtt, and also --word-timestamps)"

subtitle_options = field_options(SubtitleOptions, group=SUBTITLES)


def chosen_subtitles(
    chosen: dict[str, Any], output_format: str, word_timestamps: bool
) -> SubtitleOptions:
    """The subtitle options made of the chosen values.

    Args:
        chosen: values by parameter name, as click parsed them.
        output_format: the format in which the transcript is written.
        word_timestamps: whether the transcript will have word timestamps.

    Raises:
        click.UsageError: an option needs another format, or word timestamps.
    """
    options = SubtitleOptions(**field_values(SubtitleOptions, chosen))
    for name in options.set_options:
        if output_format not in ("srt", "vtt"):
            raise click.UsageError(
                f"{_flag(name)} requires --output-format srt or --output-format vtt"
            )
        if not word_timestamps:
            raise click.UsageError(f"{_flag(name)} requires --word-timestamps")
    if options.max_line_count and not options.max_line_width:
        print_warning("--max-line-count has no effect without --max-line-width")
    if options.max_words_per_line and options.joins_segments:
        print_warning(
            "--max-words-per-line has no effect with --max-line-width and --max-line-count"
        )
    return options


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


FEATURES = "Features (encoder output of a device)"

feature_options = together(
    option(
        "--features",
        "feature_files",
        group=FEATURES,
        type=InputPath(dir_okay=False),
        multiple=True,
        metavar="FILE",
        help="Transcribe the encoder's output in FILE, headerless or .npy, in place of AUDIO. FILE "
        "holds one window; repeat the option for the next windows, in order",
    ),
    field_options(FeatureOptions, group=FEATURES),
    field_options(FeatureStorage, group=FEATURES),
)


def chosen_features(chosen: dict[str, Any]) -> FeatureOptions:
    """The options about features, among the chosen values.

    Args:
        chosen: values by parameter name, as click parsed them.

    Raises:
        UsageError: values contradict each other.
    """
    storage = FeatureStorage(**field_values(FeatureStorage, chosen))
    return FeatureOptions(storage=storage, **field_values(FeatureOptions, chosen))


def check_features(
    features: tuple[Path, ...],
    stored: FeatureOptions,
    audio: tuple[str, ...],
    output: Path | None,
    *,
    vad: bool,
) -> None:
    """Check that either audio or features are given, and that no option contradicts the features.

    Raises:
        click.UsageError: neither or both are given, or an option needs the other.
    """
    if not features:
        if stored != FeatureOptions():
            raise click.UsageError(
                "an option --features-... requires --features with the file to transcribe"
            )
        if not audio:
            raise click.UsageError(
                "missing argument 'AUDIO'; `whisperport live` uses the microphone"
            )
        return
    excluded = {"AUDIO": bool(audio), "--output-dir": output is not None, "--vad": vad}
    for name in (name for name, is_given in excluded.items() if is_given):
        raise click.UsageError(
            f"--features and {name} exclude each other: the features are all that is transcribed"
        )
