"""Decode a window again, warmer, when the result looks like a failure.

Source: openai/whisper@v20250625, whisper/transcribe.py:188-232.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from whisperport.ranges import check_range
from whisperport.runtime.cache import Floats
from whisperport.runtime.decode import Decoded, decode_window
from whisperport.runtime.decoder import Decoder
from whisperport.runtime.options import DecodeOptions
from whisperport.runtime.search import TokenSampler

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """When a window has failed, and when it is silence. None: never."""

    compression_ratio_threshold: float | None = 2.4  # of the text by zlib; above: it repeats itself
    logprob_threshold: float | None = -1.0  # average per token; below: the model is unsure
    no_speech_threshold: float | None = 0.6  # above, and unsure: silence, which is no failure

    def __post_init__(self) -> None:
        """Raises UsageError for one that no window could meet, or that every window would."""
        check_range("compression_ratio_threshold", self.compression_ratio_threshold, 0, 1000)
        check_range("logprob_threshold", self.logprob_threshold, -1000, 0)
        check_range("no_speech_threshold", self.no_speech_threshold, 0, 1)


def compression_ratio(text: str) -> float:
    """Bytes of `text` per byte of its zlib form; high for repetitions."""
    data = text.encode("utf-8")
    return len(data) / len(zlib.compress(data))


def decode_with_fallback(
    decoder: Decoder,
    features: Floats,
    options: DecodeOptions,
    temperatures: tuple[float, ...],
    thresholds: Thresholds,
    text_of: Callable[[tuple[int, ...]], str],
    sampler: TokenSampler | None = None,
) -> tuple[Decoded, float]:
    """The first result that is no failure, or the last; and its text's compression ratio."""
    assert temperatures, "at least one temperature"
    for temperature in temperatures:
        decoded = decode_window(decoder, features, _at(options, temperature), sampler=sampler)
        ratio = compression_ratio(text_of(decoded.tokens).strip())
        if not _failed(decoded, ratio, thresholds):
            break
    return decoded, ratio


def is_silence(decoded: Decoded, thresholds: Thresholds) -> bool:
    """Whether a window is passed over: probably no speech, and no sure words either."""
    if (
        thresholds.no_speech_threshold is None
        or decoded.no_speech_prob <= thresholds.no_speech_threshold
    ):
        return False
    return (
        thresholds.logprob_threshold is None or decoded.avg_logprob <= thresholds.logprob_threshold
    )


def _at(options: DecodeOptions, temperature: float) -> DecodeOptions:
    """Beams are for temperature 0, independent paths for those above."""
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
