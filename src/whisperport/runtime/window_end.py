"""Decode speech again in the next window if the end of a short window may have cut it off.

The end of a 30 s window cuts off few sentences; the end of a 5 s window cuts off almost every one. Then the
decoder invents the rest of the sentence, places its end too early, or repeats it at the last timestamps.
Therefore a segment that ends in the last seconds of a short window is dropped, and the next window begins
before it.
openai-whisper does not do this, and it is not done in a checkpoint's own window.
"""

from itertools import takewhile

from whisperport.audio import FRAMES_PER_SECOND
from whisperport.program.dims import SECONDS_PER_POSITION
from whisperport.runtime.segments import SegmentedWindow, WindowSegment

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
