"""Compare transcripts with the texts spoken: windows of audio samples, word error rates, timestamp errors
and confidence intervals."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jiwer
import numpy as np
from numpy.typing import NDArray
from whisper.decoding import DecodingResult
from whisper.normalizers import EnglishTextNormalizer

from corpus import Utterance
from synthesizers import SAMPLE_RATE
from vocabulary import TIME_BEGIN

Samples = NDArray[np.float32]
NORMALIZE = EnglishTextNormalizer()


@dataclass
class Spoken:
    """A window: samples at 16 kHz, and the utterances in it with their (start, end) in seconds."""

    samples: Samples
    utterances: list[Utterance]
    times: list[tuple[float, float]]

    @property
    def text(self) -> str:
        return " ".join(u.text for u in self.utterances)


def window_of(
    utterances: Sequence[Utterance], rng: np.random.Generator, seconds: float = 30.0
) -> Spoken:
    """Join utterances, scaled to the same level, with gaps of 0.3 to 2.5 s.

    Utterances that do not end within ``seconds`` are omitted.
    """
    pieces, times, at = [], [], round(float(rng.uniform(0.05, 0.9)), 2)
    pieces.append(np.zeros(round(at * SAMPLE_RATE), np.float32))
    kept = []
    for utterance in utterances:
        if at + utterance.seconds > seconds:
            break
        assert utterance.samples is not None
        audio = utterance.samples.astype(np.float32)
        gap = np.zeros(int(rng.uniform(0.3, 2.5) * 100) * 160, np.float32)
        pieces += [audio * (0.4 / np.abs(audio).max()), gap]
        times.append((at + utterance.start, at + utterance.end))
        kept.append(utterance)
        at += utterance.seconds + len(gap) / SAMPLE_RATE
    pieces[-1] = pieces[-1][: SAMPLE_RATE // 3]
    return Spoken(np.concatenate(pieces), kept, times)


def words(text: str) -> str:
    """Return the text in lower case, without punctuation, with hyphens as spaces."""
    return " ".join(re.findall(r"[a-z']+", text.lower()))


def interval(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the 95 % bootstrap interval of sum(values) / sum(weights)."""
    rng, v, w = np.random.default_rng(0), np.array(values, float), np.array(weights, float)
    picks = rng.integers(0, len(v), (1000, len(v)))
    ratios = v[picks].sum(1) / np.maximum(w[picks].sum(1), 1e-9)
    return [round(float(x), 2) for x in np.percentile(ratios, (2.5, 97.5))]


def word_error_rate(references: Sequence[str], hypotheses: Sequence[str]) -> dict[str, Any]:
    """Return the WER in per cent, plain and with Whisper's English normalizer, its interval and counts."""
    errors, lengths, exact = [], [], 0
    whisper_errors, whisper_words = 0, 0
    for reference, hypothesis in zip(references, hypotheses, strict=True):
        out = jiwer.process_words(words(reference), words(hypothesis) or "<nothing>")
        errors.append(100 * (out.substitutions + out.deletions + out.insertions))
        lengths.append(len(words(reference).split()))
        out = jiwer.process_words(NORMALIZE(reference), NORMALIZE(hypothesis) or "<nothing>")
        whisper_errors += out.substitutions + out.deletions + out.insertions
        whisper_words += len(NORMALIZE(reference).split())
        exact += reference == hypothesis.strip()
    return {
        "wer": round(sum(errors) / sum(lengths), 2),
        "interval": interval(errors, lengths),
        "wer_whisper_normalizer": round(100 * whisper_errors / whisper_words, 2),
        "windows": len(errors),
        "words": sum(lengths),
        "exact_strings": round(100 * exact / len(errors), 1),
    }


def describe_errors(
    spoken: Sequence[Spoken], results: Sequence[DecodingResult], count: int
) -> list[list[str]]:
    """Return the first ``count`` wrong transcripts, each as [voice, text spoken, transcript]."""
    wrong = [
        [s.utterances[0].voice, s.text, r.text]
        for s, r in zip(spoken, results, strict=True)
        if words(s.text) != words(r.text)
    ]
    return wrong[:count]


def stamp_errors(spoken: Sequence[Spoken], results: Sequence[DecodingResult]) -> dict[str, Any]:
    """Return the errors of segment starts and ends in seconds.

    Only windows with the right number of timestamps count.
    """
    starts, ends, right = [], [], 0
    for item, result in zip(spoken, results, strict=True):
        stamps = [(t - TIME_BEGIN) * 0.02 for t in result.tokens if t >= TIME_BEGIN]
        if len(stamps) != 2 * len(item.times):
            continue
        right += 1
        starts += [abs(a - t[0]) for a, t in zip(stamps[::2], item.times, strict=True)]
        ends += [abs(a - t[1]) for a, t in zip(stamps[1::2], item.times, strict=True)]
    summary: dict[str, Any] = {
        "windows": len(spoken),
        "windows_with_all_stamps": right,
        "segments": len(starts),
    }
    for name, values in (("start", starts), ("end", ends)):
        median, ninth = np.percentile(values, (50, 90)) if values else (np.nan, np.nan)
        summary |= {
            f"{name}_median": round(float(median), 3),
            f"{name}_90th": round(float(ninth), 3),
        }
    return summary


def by_group(
    groups: dict[str, Callable[[Utterance], bool]],
    single: Sequence[Spoken],
    results: Sequence[DecodingResult],
) -> dict[str, Any]:
    """Return the WER of each group of voices."""
    out = {}
    for name, belongs in groups.items():
        pairs = [
            (s.text, r.text)
            for s, r in zip(single, results, strict=True)
            if belongs(s.utterances[0])
        ]
        out[name] = word_error_rate(*zip(*pairs, strict=True))
    return out
