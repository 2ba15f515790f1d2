"""Skip silence in which the model hallucinated text, detected by improbable, too short or too long words.

Source: openai/whisper@v20250625, whisper/transcribe.py:312-345 and 424-480.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from whisperport.speech.audio import FRAMES_PER_SECOND
from whisperport.speech.text import Segment, Word

PUNCTUATION = "\"'“¿([{-\"'.。,，!！?？:：”)]}、"


@dataclass(frozen=True, slots=True)
class WindowPosition:
    """Position of a window in the audio, in seconds."""

    start_s: float
    audio_s: float  # duration of the audio in it
    length_s: float  # longest duration that it can contain
    total_s: float | None  # duration of all audio; None: unknown

    @property
    def end_s(self) -> float:
        """End of the window if it is full, in seconds."""
        return self.start_s + self.length_s


@dataclass(frozen=True, slots=True)
class KeptSegments:
    """The segments of a window that are kept, and where the next window begins."""

    segments: tuple[Segment, ...]
    seek: int  # first mel frame of the next window
    restart: bool = False  # whether nothing of the window is kept, and decoding continues at `seek`


def skip_hallucinations(
    segments: Sequence[Segment],
    window: WindowPosition,
    seek: int,
    last_speech: float,
    threshold: float,
) -> KeptSegments:
    """Drop anomalous segments that are surrounded by more than `threshold` seconds of silence.

    Args:
        segments: of one window, with words.
        window: position of the window.
        seek: mel frame at which the next window would begin.
        last_speech: end of the last word before this window, in seconds.
        threshold: seconds of silence.
    """
    first = _first_with_words(segments)
    if first is not None and is_anomaly(first):
        gap = first.start - window.start_s
        if gap > threshold:
            start = round(window.start_s * FRAMES_PER_SECOND)
            return KeptSegments((), start + round(gap * FRAMES_PER_SECOND), restart=True)
    before = last_speech
    for i, segment in enumerate(segments):
        if not segment.words:
            continue
        if is_anomaly(segment) and _in_silence(
            segment, _first_with_words(segments[i + 1 :]), before, window, threshold
        ):
            seek = round(max(window.start_s + 1, segment.start) * FRAMES_PER_SECOND)
            if window.total_s is not None and window.total_s - segment.end < threshold:
                seek = round(window.total_s * FRAMES_PER_SECOND)
            return KeptSegments(tuple(segments[:i]), seek)
        before = segment.end
    return KeptSegments(tuple(segments), seek)


def is_anomaly(segment: Segment) -> bool:
    """Return whether the first eight words of a segment look like a hallucination."""
    spoken = segment.words or ()
    words = [word for word in spoken if word.word not in PUNCTUATION][:8]
    score = sum(_anomaly(word) for word in words)
    return bool(spoken) and (score >= 3 or score + 0.01 >= len(words))


def _anomaly(word: Word) -> float:
    """Return the anomaly score of a word: above 0 if improbable, below 0.133 s or above 2 s long."""
    duration = word.end - word.start
    score = 1.0 if word.probability < 0.15 else 0.0
    if duration < 0.133:
        score += (0.133 - duration) * 15
    if duration > 2.0:
        score += duration - 2.0
    return score


def _in_silence(
    segment: Segment,
    following: Segment | None,
    before: float,
    window: WindowPosition,
    threshold: float,
) -> bool:
    after = (
        following.words[0].start
        if following and following.words
        else window.start_s + window.audio_s
    )
    silent_before = (
        segment.start - before > threshold
        or segment.start < threshold
        or segment.start - window.start_s < 2.0
    )
    silent_after = (
        after - segment.end > threshold
        or (following is not None and is_anomaly(following))
        or window.end_s - segment.end < 2.0
    )
    return silent_before and silent_after


def _first_with_words(segments: Sequence[Segment]) -> Segment | None:
    return next((segment for segment in segments if segment.words), None)
