"""Cut what was said in a window into segments at its timestamps, and say where the next one begins.

Source: openai/whisper@v20250625, whisper/transcribe.py:347-405.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from whisperport.dims import SECONDS_PER_POSITION

FRAMES_PER_POSITION = 2  # mel frames of 10 ms in an encoder position of 20 ms


@dataclass(frozen=True, slots=True)
class WindowSegment:
    """One segment of a window: seconds from the window's beginning, tokens with timestamps."""

    start_s: float
    end_s: float
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SegmentedWindow:
    """A window, cut."""

    pieces: tuple[WindowSegment, ...]
    advance: int  # mel frames to the next window
    closed: bool  # it ended with a single timestamp: no speech follows it in this window


def split_segments(tokens: Sequence[int], begin: int, n_frames: int) -> SegmentedWindow:
    """Cut at every pair of timestamps.

    Where a segment was left open, the next window begins with it; where none was, after this one.

    Args:
        tokens: text and timestamps, at least one.
        begin: the id of <|0.00|>.
        n_frames: mel frames of sound in the window.
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
    pieces = []
    for start, end in zip([0, *ends], ends, strict=False):
        part = tuple(tokens[start:end])
        # Text that no time opens, said where none were asked for: the original counts it from below 0.
        first, last = max(0, part[0] - begin), part[-1] - begin
        pieces.append(
            WindowSegment(first * SECONDS_PER_POSITION, last * SECONDS_PER_POSITION, part)
        )
    advance = n_frames if closed else (tokens[ends[-1] - 1] - begin) * FRAMES_PER_POSITION
    return SegmentedWindow(tuple(pieces), advance, closed)
