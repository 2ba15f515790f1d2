"""The decoding options of `whisperport transcribe`, with openai-whisper's names and defaults."""

from typing import Any

from whisperport.cli.fields import field_options, field_values
from whisperport.cli.verb import together
from whisperport.runtime import DecodeOptions, Thresholds
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions

DECODING = "Decoding"
PROMPT = "Prompt"
FALLBACK = "Fallback (when a window is decoded again, or skipped as silence)"

audio_options = field_options(TranscribeOptions, "clip_timestamps", group="Audio")
word_options = field_options(
    TranscribeOptions,
    *("word_timestamps", "prepend_punctuations", "append_punctuations"),
    group="Word timestamps",
)
decoding_options = together(
    field_options(DecodeOptions, group=DECODING),
    field_options(TranscribeOptions, "temperatures", group=DECODING),
    field_options(
        TranscribeOptions,
        *("initial_prompt", "carry_initial_prompt", "condition_on_previous_text", "prefix"),
        group=PROMPT,
    ),
    field_options(Thresholds, group=FALLBACK),
    field_options(TranscribeOptions, "hallucination_silence_threshold", group=FALLBACK),
)


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
        **field_values(TranscribeOptions, chosen),
    )
