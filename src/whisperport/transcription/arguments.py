"""openai-whisper's argument names as keyword arguments of `transcribe`."""

import difflib
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypedDict

from whisperport.audio import VadOptions
from whisperport.errors import UsageError
from whisperport.runtime import DecodeOptions, Thresholds
from whisperport.transcription.options import TranscribeOptions


class TranscribeArguments(TypedDict, total=False):
    """The keyword arguments of `transcribe`; see `TranscribeOptions`, `DecodeOptions` and `Thresholds`.

    `temperature` is openai-whisper's name of `temperatures`, and may be one number.
    """

    language: str | None
    task: str
    without_timestamps: bool
    max_tokens: int | None
    best_of: int | None
    beam_size: int | None
    patience: float | None
    length_penalty: float | None
    suppress_tokens: tuple[int, ...]
    suppress_blank: bool
    max_initial_timestamp: float | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int
    compression_ratio_threshold: float | None
    logprob_threshold: float | None
    no_speech_threshold: float | None
    temperature: float | tuple[float, ...]
    temperatures: tuple[float, ...]
    condition_on_previous_text: bool | None
    initial_prompt: str | None
    carry_initial_prompt: bool
    prefix: str
    word_timestamps: bool
    hallucination_silence_threshold: float | None
    prepend_punctuations: str
    append_punctuations: str
    clip_timestamps: tuple[float, ...]
    vad: VadOptions | None
    workers: int
    batch: bool


def with_arguments(
    options: TranscribeOptions | None, given: Mapping[str, Any]
) -> TranscribeOptions:
    """Return the options with the values of keyword arguments in place of their own.

    Args:
        options: transcription options; None: defaults.
        given: values by the names of `TranscribeArguments`.

    Raises:
        UsageError: there is no such argument, or a value is out of its range.
    """
    options, values = options or TranscribeOptions(), dict(given)
    for name in values:
        _check_name(name)
    if "temperature" in values:
        one = values.pop("temperature")
        values["temperatures"] = (one,) if isinstance(one, int | float) else tuple(one)
    if values.get("initial_prompt", "") is None:  # openai-whisper's default
        values["initial_prompt"] = ""
    own = {one.name for one in fields(TranscribeOptions)}
    for part in ("decode", "thresholds"):
        before: DecodeOptions | Thresholds = getattr(options, part)
        names = {one.name for one in fields(before)} - own
        values[part] = replace(before, **{name: values.pop(name) for name in names & {*values}})
    return replace(options, **values)


def _check_name(name: str) -> None:
    known = TranscribeArguments.__annotations__
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise UsageError(
            f"`transcribe` has no argument `{name}`",
            hint=f"did you mean `{near[0]}`?"
            if near
            else f"its arguments are {', '.join(sorted(known))}",
        )
