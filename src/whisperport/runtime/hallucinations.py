"""Skip silence in which words were invented: told by improbable, too short or too long words.

Source: openai/whisper@v20250625, whisper/transcribe.py:312-345 and 424-480.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from whisperport.audio import FRAMES_PER_SECOND
from whisperport.text import Segment, Word

PUNCTUATION = "\"'“¿([{-\"'.。,，!！?？:：”)]}、"


@dataclass(frozen=True, slots=True)
class Window:
    """Where a window lies in the recording."""

    start_s: float
    sound_s: float  # seconds of sound in it
    length_s: float  # seconds it could hold
    recording_s: float | None  # length of the whole recording, where it is known

    @property
    def end_s(self) -> float:
        return self.start_s + self.length_s


@dataclass(frozen=True, slots=True)
class KeptSegments:
    """Which segments of a window are kept, and the frame at which the next one begins."""

    segments: tuple[Segment, ...]
    seek: int
    restart: bool = False  # the window is decoded again from `seek`, and nothing of it kept


def skip_hallucinations(
    segments: Sequence[Segment], window: Window, seek: int, last_speech: float, threshold: float
) -> KeptSegments:
    """Drop segments that are anomalous and stand in silence of more than `threshold` seconds.

    Args:
        seek: the frame at which the next window would begin.
        last_speech: seconds at which the last word before this window ended.
    """
    first = _next_spoken(segments)
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
            segment, _next_spoken(segments[i + 1 :]), before, window, threshold
        ):
            seek = round(max(window.start_s + 1, segment.start) * FRAMES_PER_SECOND)
            if window.recording_s is not None and window.recording_s - segment.end < threshold:
                seek = round(window.recording_s * FRAMES_PER_SECOND)
            return KeptSegments(tuple(segments[:i]), seek)
        before = segment.end
    return KeptSegments(tuple(segments), seek)


def is_anomaly(segment: Segment) -> bool:
    """Whether the first eight words look invented rather than heard."""
    spoken = segment.words or ()
    words = [word for word in spoken if word.word not in PUNCTUATION][:8]
    score = sum(_anomaly(word) for word in words)
    return bool(spoken) and (score >= 3 or score + 0.01 >= len(words))


def _anomaly(word: Word) -> float:
    duration = word.end - word.start
    score = 1.0 if word.probability < 0.15 else 0.0
    if duration < 0.133:
        score += (0.133 - duration) * 15
    if duration > 2.0:
        score += duration - 2.0
    return score


def _in_silence(
    segment: Segment, following: Segment | None, before: float, window: Window, threshold: float
) -> bool:
    after = (
        following.words[0].start
        if following and following.words
        else window.start_s + window.sound_s
    )
    quiet_before = (
        segment.start - before > threshold
        or segment.start < threshold
        or segment.start - window.start_s < 2.0
    )
    quiet_after = (
        after - segment.end > threshold
        or (following is not None and is_anomaly(following))
        or window.end_s - segment.end < 2.0
    )
    return quiet_before and quiet_after


def _next_spoken(segments: Sequence[Segment]) -> Segment | None:
    return next((segment for segment in segments if segment.words), None)
