"""Add words to segments: join punctuation, shorten long words, and set segment times from words.

Source: openai/whisper@v20250625, whisper/timing.py:240-388.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from whisperport.runtime.segments.alignment import Timing
from whisperport.speech.text import Segment, Word

PREPENDED = "\"'“¿([{-"  # marks joined to the next word
APPENDED = "\"'.。,，!！?？:：”)]}、"  # marks joined to the previous word
SENTENCE_ENDS = ".。!！?？"


def add_words(
    segments: Sequence[Segment],
    timings: list[Timing],
    *,
    end_of_text: int,
    last_speech: float,
    prepended: str = PREPENDED,
    appended: str = APPENDED,
) -> list[Segment]:
    """Return the segments of one window with their words.

    Args:
        segments: in order, with times from the beginning of the audio.
        timings: words of all segments, with times from the beginning of the window. They are changed.
        end_of_text: id of the end of text.
        last_speech: end of the last word before this window, in seconds.
        prepended: punctuation marks that are joined to the next word.
        appended: punctuation marks that are joined to the previous word.
    """
    typical, longest = _durations(timings)
    if longest:
        _shorten_at_sentence_ends(timings, longest)
    _join_punctuation(timings, prepended, appended)
    offset = segments[0].seek / 100 if segments else 0.0
    remaining = iter(timings)
    with_words = []
    for segment in segments:
        n_tokens = sum(token < end_of_text for token in segment.tokens)
        words = _take(remaining, n_tokens, offset)
        if words:
            segment, words = _fit(segment, words, last_speech, typical, longest)
            last_speech = segment.end
        with_words.append(replace(segment, words=tuple(words)))
    return with_words


def _durations(timings: Sequence[Timing]) -> tuple[float, float]:
    """Return the median duration of a word, at most 0.7 s, and twice that; 0 if there are no words."""
    durations = sorted(t.end - t.start for t in timings if t.end != t.start)
    if not durations:
        return 0.0, 0.0
    middle = len(durations) // 2
    even = len(durations) % 2 == 0
    median = (durations[middle - 1] + durations[middle]) / 2 if even else durations[middle]
    typical = min(0.7, median)
    return typical, 2 * typical


def _shorten_at_sentence_ends(timings: list[Timing], longest: float) -> None:
    """Shorten words longer than `longest` seconds at the end of a sentence, in place."""
    for before, timing in pairwise(timings):
        if timing.end - timing.start > longest:
            if timing.word in SENTENCE_ENDS:
                timing.end = timing.start + longest
            elif before.word in SENTENCE_ENDS:
                timing.start = timing.end - longest


def _join_punctuation(timings: list[Timing], prepended: str, appended: str) -> None:
    """Join marks to the next or the previous word, in place; a joined mark becomes an empty word."""
    following = len(timings) - 1
    for i in range(len(timings) - 2, -1, -1):
        mark = timings[i]
        if mark.word.startswith(" ") and mark.word.strip() in prepended:
            timings[following].word = mark.word + timings[following].word
            timings[following].tokens = mark.tokens + timings[following].tokens
            mark.word, mark.tokens = "", []
        else:
            following = i
    previous = 0
    for i in range(1, len(timings)):
        mark = timings[i]
        if not timings[previous].word.endswith(" ") and mark.word in appended:
            timings[previous].word += mark.word
            timings[previous].tokens = timings[previous].tokens + mark.tokens
            mark.word, mark.tokens = "", []
        else:
            previous = i


def _take(timings: Iterator[Timing], n_tokens: int, offset: float) -> list[Word]:
    """Return the next words that together have at least `n_tokens` tokens."""
    words, position = [], 0
    while position < n_tokens:
        timing = next(timings, None)
        if timing is None:
            break
        if timing.word:
            start, end = round(offset + timing.start, 2), round(offset + timing.end, 2)
            words.append(Word(timing.word, start, end, timing.probability))
        position += len(timing.tokens)
    return words


def _fit(
    segment: Segment, words: list[Word], last_speech: float, typical: float, longest: float
) -> tuple[Segment, list[Word]]:
    """Shorten long words at the bounds of a segment, and set its times from its first and last word."""
    first = words[0]
    if first.end - last_speech > typical * 4 and (
        first.end - first.start > longest
        or (len(words) > 1 and words[1].end - first.start > longest * 2)
    ):
        if len(words) > 1 and words[1].end - words[1].start > longest:
            boundary = max(words[1].end / 2, words[1].end - longest)
            first = replace(first, end=boundary)
            words[1] = replace(words[1], start=boundary)
        first = replace(first, start=max(0, first.end - longest))
    words[0] = first
    start, end = segment.start, segment.end

    if start < first.end and start - 0.5 > first.start:
        words[0] = replace(first, start=max(0, min(first.end - typical, start)))
    else:
        start = first.start
    last = words[-1]
    if end > last.start and end + 0.5 < last.end:
        words[-1] = replace(last, end=max(last.start + typical, end))
    else:
        end = last.end
    return replace(segment, start=start, end=end), words
