"""What a short window's end cut off is heard again, whole, by the next window.

A window of 30 s ends inside of one sentence in many; one of 5 s in almost every one. The decoder then
completes the sentence as it likes, says that it ended earlier, or says it again and again at the
window's last timestamps. So a segment that ends in the window's last seconds is not believed: the next
window begins before it.
Not part of openai-whisper, and not done in a checkpoint's own window.
"""

from itertools import takewhile

from whisperport.audio import FRAMES_PER_SECOND
from whisperport.dims import SECONDS_PER_POSITION
from whisperport.runtime.segments import SegmentedWindow, WindowSegment

# Frames of 10 ms before a window's end, at most two fifths of it; measured, not derived.
UNSURE = 300
LEAST = 10  # frames that a window goes on at least


def drop_unreliable_end(cut: SegmentedWindow, begin: int, n_frames: int) -> SegmentedWindow:
    """The cut without the segments that the end of a window of `n_frames` frames may have cut off.

    A segment that fills the window is kept, as no later window would hear more of it.

    begin  the id of <|0.00|>
    """
    until_s = (n_frames - min(UNSURE, n_frames * 2 // 5)) / FRAMES_PER_SECOND
    sure = list(takewhile(lambda piece: _end_s(piece, begin) <= until_s, cut.pieces))
    if len(sure) == len(cut.pieces):
        return cut
    start_s = sure[-1].end_s if sure else _start_s(cut.pieces[0], begin)
    start = round(start_s * FRAMES_PER_SECOND)
    return SegmentedWindow(tuple(sure), start, closed=False) if start >= LEAST else cut


def _start_s(piece: WindowSegment, begin: int) -> float:
    """Where a segment says that it begins; a piece that was not closed begins with its window."""
    return max(0, piece.tokens[0] - begin) * SECONDS_PER_POSITION


def _end_s(piece: WindowSegment, begin: int) -> float:
    """Where a segment says that it ends; infinite if it does not."""
    closed = len(piece.tokens) > 1 and piece.tokens[-1] >= begin
    return piece.end_s if closed else float("inf")
