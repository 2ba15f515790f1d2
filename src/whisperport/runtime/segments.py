"""Split the tokens of a window into segments at timestamps, and compute where the next window begins.

Source: openai/whisper@v20250625, whisper/transcribe.py:347-405.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from whisperport.program.dims import SECONDS_PER_POSITION

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
