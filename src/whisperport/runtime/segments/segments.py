"""Split the tokens of a window into segments at timestamps, and compute where the next window begins.

Source: openai/whisper@v20250625, whisper/transcribe.py:347-405.

`drop_unreliable_end` leaves speech that the end of a short window may have cut off to the next window.
The end of a 30 s window cuts off few sentences; the end of a 5 s window cuts off almost every one. Then
the decoder invents the rest of the sentence, places its end too early, or repeats it at the last
timestamps. Therefore a segment that ends in the last seconds of a short window is dropped, and the next
window begins before it. openai-whisper does not do this, and it is not done in a checkpoint's own window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from whisperport.program.dims import SECONDS_PER_POSITION
from whisperport.speech.audio import FRAMES_PER_SECOND

FRAMES_PER_POSITION = 2  # mel frames of 10 ms in an encoder position of 20 ms


@dataclass(frozen=True, slots=True)
class WindowSegment:
    """One segment of a window, in time from the beginning of the window."""

    start_s: float  # seconds
    end_s: float  # seconds
    tokens: tuple[int, ...]  # text and timestamps


@dataclass(frozen=True, slots=True)
class SegmentedWindow:
    """The segments of a window, and where the next window begins."""

    segments: tuple[WindowSegment, ...]
    advance: int  # mel frames from the beginning of this window to the next
    closed: bool  # whether a single timestamp ends the window: no speech follows in it


def split_segments(tokens: Sequence[int], begin: int, n_frames: int) -> SegmentedWindow:
    """Split tokens at every pair of timestamps.

    If the last segment has no end, the next window begins where that segment begins. Otherwise it begins at
    the end of this window.

    Args:
        tokens: text and timestamps of one window, at least one.
        begin: the id of <|0.00|>.
        n_frames: mel frames of audio in the window, 10 ms each.
    """
    times = [token >= begin for token in tokens]
    closed = times[-2:] == [False, True]
    ends = [i + 1 for i in range(len(tokens) - 1) if times[i] and times[i + 1]]
    if not ends:
        last = next((token for token in reversed(tokens) if token >= begin), begin)
        seconds = (last - begin) * SECONDS_PER_POSITION if last != begin else n_frames / 100
        return SegmentedWindow((WindowSegment(0.0, seconds, tuple(tokens)),), n_frames, closed)
    if closed:
        ends.append(len(tokens))
    segments = []
    for start, end in zip([0, *ends], ends, strict=False):
        part = tuple(tokens[start:end])
        # The first token may be text if the prompt asks for no timestamps; clamp the start to 0.
        first, last = max(0, part[0] - begin), part[-1] - begin
        segments.append(
            WindowSegment(first * SECONDS_PER_POSITION, last * SECONDS_PER_POSITION, part)
        )
    advance = n_frames if closed else (tokens[ends[-1] - 1] - begin) * FRAMES_PER_POSITION
    return SegmentedWindow(tuple(segments), advance, closed)


# Mel frames of 10 ms before the end of a window, at most two fifths of it. The value was measured.
UNRELIABLE_FRAMES = 300
MIN_ADVANCE = 10  # mel frames from one window to the next, at least


def drop_unreliable_end(window: SegmentedWindow, begin: int, n_frames: int) -> SegmentedWindow:
    """Drop the segments that the end of the window may have cut off.

    A segment that fills the window is kept, because no later window would contain more of it.

    Args:
        window: segments of the window.
        begin: the id of <|0.00|>.
        n_frames: mel frames of audio in the window.
    """
    until_s = (n_frames - min(UNRELIABLE_FRAMES, n_frames * 2 // 5)) / FRAMES_PER_SECOND
    kept = list(takewhile(lambda segment: _end_s(segment, begin) <= until_s, window.segments))
    if len(kept) == len(window.segments):
        return window
    start_s = kept[-1].end_s if kept else _start_s(window.segments[0], begin)
    start = round(start_s * FRAMES_PER_SECOND)
    return SegmentedWindow(tuple(kept), start, closed=False) if start >= MIN_ADVANCE else window


def _start_s(segment: WindowSegment, begin: int) -> float:
    """Return the start of a segment in seconds; without a start timestamp, the start of the window."""
    return max(0, segment.tokens[0] - begin) * SECONDS_PER_POSITION


def _end_s(segment: WindowSegment, begin: int) -> float:
    """Return the end of a segment in seconds; without an end timestamp, infinity."""
    closed = len(segment.tokens) > 1 and segment.tokens[-1] >= begin
    return segment.end_s if closed else float("inf")
