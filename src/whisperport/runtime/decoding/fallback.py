"""Decode a window again at a higher temperature if the result looks like a failure.

A window that is as short as its audio is decoded once, and again in full if its text is not trusted.

Source: openai/whisper@v20250625, whisper/transcribe.py:188-232.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Annotated

from whisperport.runtime.decoding.decode import Decoded, decoding
from whisperport.runtime.decoding.decode_options import DecodeOptions
from whisperport.runtime.decoding.search import TokenSampler
from whisperport.runtime.engine.engine import Engine
from whisperport.runtime.engine.scores import Floats
from whisperport.runtime.kv_cache.decoder import Decoder
from whisperport.runtime.kv_cache.stepping import Steps
from whisperport.system.option import Option, check_ranges

LOG_HALF = math.log(0.5)
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # openai-whisper's


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """When the decoding of a window has failed, and when a window is silence.

    Names and defaults are those of openai-whisper's `transcribe`. None turns a test off.

    Raises:
        UsageError: a value is out of its range.
    """

    compression_ratio_threshold: Annotated[
        float | None,
        Option(
            "Decode a window again at the next temperature if the zlib compression ratio of its text "
            "is above this, a sign of repetition; `none` turns this off",
            0,
            1000,
            or_none=True,
        ),
    ] = 2.4
    logprob_threshold: Annotated[
        float | None,
        Option(
            "Decode a window again at the next temperature if the average log-probability of its "
            "tokens is below this; `none` turns this off",
            -1000,
            0,
            or_none=True,
        ),
    ] = -1.0
    no_speech_threshold: Annotated[
        float | None,
        Option(
            "Skip a window as silence if the probability of no speech is above this and the average "
            "log-probability is below `logprob_threshold`; `none` turns this off",
            0,
            1,
            or_none=True,
        ),
    ] = 0.6

    def __post_init__(self) -> None:
        check_ranges(self)


def compression_ratio(text: str) -> float:
    """Return bytes of UTF-8 `text` per byte after zlib compression. Repetitive text has a high ratio."""
    data = text.encode("utf-8")
    return len(data) / len(zlib.compress(data))


def decoding_with_fallback(
    decoder: Decoder,
    features: Floats,
    options: DecodeOptions,
    temperatures: tuple[float, ...],
    thresholds: Thresholds,
    text_of: Callable[[tuple[int, ...]], str],
    sampler: TokenSampler | None = None,
) -> Steps[tuple[Decoded, float]]:
    """Decode a window at each temperature until the result is no failure; the caller runs the steps.

    Args:
        decoder: the state of this call.
        features: (T, d) float32, the encoder's output.
        options: decoding options; their temperature is replaced.
        temperatures: tried in this order, at least one.
        thresholds: what counts as a failure.
        text_of: decodes tokens to the text whose compression ratio is computed.
        sampler: see `decode_window`.

    Returns:
        The first result that is no failure, or else the last one; and the compression ratio of its text.

    Raises:
        UsageError, NumericalError: see `decode_window`.
    """
    assert temperatures, "at least one temperature"
    for temperature in temperatures:
        at = _at_temperature(options, temperature)
        decoded = yield from decoding(decoder, features, at, sampler)
        ratio = compression_ratio(text_of(decoded.tokens).strip())
        if not _failed(decoded, ratio, thresholds):
            break
    return decoded, ratio


def is_trusted(decoded: Decoded, ratio: float, thresholds: Thresholds, engine: Engine) -> bool:
    """Return whether the text of a short window is used, so that the full window is not needed.

    It ends, is no failure, says no sentence twice, and is probable enough not to depend on the window.

    Args:
        decoded: result of one temperature.
        ratio: compression ratio of its text.
        thresholds: what counts as a failure.
        engine: of the window.
    """
    windows, begin = engine.short_windows, engine.generation.timestamp_begin
    is_sure = windows is not None and is_probable(
        decoded.avg_logprob, text_logprob(decoded, begin), windows.min_logprob
    )
    return is_sure and not _failed(decoded, ratio, thresholds) and is_whole(decoded, begin)


def is_probable(avg_logprob: float, text_logprob: float, min_logprob: float) -> bool:
    """Return whether a text is probable enough not to depend on the window.

    Either it is more probable than all others together, or its tokens are on average as probable as those
    of the texts that did not depend on it. The mean alone rejects short texts, since timestamps are never
    sure: 157 of 221 of a checkpoint, whose texts the first condition rejects 2 times, with fewer errors
    (benchmarks/words/as_short_as_audio.py, `moved 11`).

    Args:
        avg_logprob: mean log-probability of its tokens, timestamps and the end included.
        text_logprob: of the text and its end.
        min_logprob: of the windows; see `ShortWindows`.
    """
    return text_logprob >= LOG_HALF or avg_logprob >= min_logprob


def text_logprob(decoded: Decoded, begin: int) -> float:
    """Return the log-probability of a text and its end, without its timestamps.

    Args:
        decoded: result of one temperature.
        begin: the id of <|0.00|>.
    """
    pairs = zip(decoded.tokens, decoded.logprobs, strict=True)
    of_times = sum(logprob for token, logprob in pairs if token >= begin)
    return decoded.avg_logprob * (len(decoded.tokens) + 1) - of_times


def is_whole(decoded: Decoded, begin: int) -> bool:
    """Return whether a text ends, and no segment of it has the text of the one before it.

    Args:
        decoded: result of one temperature.
        begin: the id of <|0.00|>.
    """
    segments = groupby(decoded.tokens, lambda token: token >= begin)
    texts = [tuple(tokens) for is_time, tokens in segments if not is_time]
    return decoded.ended and all(text != following for text, following in pairwise(texts))


def is_silence(decoded: Decoded, thresholds: Thresholds) -> bool:
    """Return whether a window is skipped: speech is improbable, and the text has a low probability."""
    if (
        thresholds.no_speech_threshold is None
        or decoded.no_speech_prob <= thresholds.no_speech_threshold
    ):
        return False
    return (
        thresholds.logprob_threshold is None or decoded.avg_logprob <= thresholds.logprob_threshold
    )


def _at_temperature(options: DecodeOptions, temperature: float) -> DecodeOptions:
    """Set a temperature, and keep beam search at temperature 0 only and `best_of` above 0 only."""
    if temperature > 0:
        return replace(options, temperature=temperature, beam_size=None, patience=None)
    return replace(options, temperature=0.0, best_of=None)


def _failed(decoded: Decoded, ratio: float, thresholds: Thresholds) -> bool:
    unsure = (
        thresholds.logprob_threshold is not None
        and decoded.avg_logprob < thresholds.logprob_threshold
    )
    if (
        unsure
        and thresholds.no_speech_threshold is not None
        and decoded.no_speech_prob > thresholds.no_speech_threshold
    ):
        return False
    repeats = (
        thresholds.compression_ratio_threshold is not None
        and ratio > thresholds.compression_ratio_threshold
    )
    return repeats or unsure
