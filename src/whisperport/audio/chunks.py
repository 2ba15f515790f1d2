"""Cut a long sound at its silences, into chunks that each fit one window.

speech   ▄▄▄▄▄▄  ▄▄▄▄     ▄▄▄▄▄▄▄ ▄▄▄        ▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄
chunks  |─────────────|  |──────────────|   |─────────────────────────|
limit   |──────────────────|
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from whisperport.audio.vad import Span


def cut_chunks(
    speech: Iterable[Span], limit: int, *, pad: int = 0, longest_silence: int | None = None
) -> Iterator[Span]:
    """Chunks that hold all speech, in rising order, none overlapping another.

    Args:
        speech: spans in rising order.
        limit: frames that a chunk has at most, unless a single span has more.
        pad: frames of silence around a chunk's speech, or half the silence where there is less.
        longest_silence: frames of it within a chunk; None: any number.
    """
    held: list[Span] = []  # they fit one chunk, or are one span that does not
    before = -2 * pad  # end of the speech before them; none: as far away as matters
    for span in speech:
        if held and longest_silence is not None and span.start - held[-1].end > longest_silence:
            yield _padded(held, before, span.start, limit, pad)
            before, held = held[-1].end, []
        while held and span.end - held[0].start + 2 * pad > limit:
            count = _best_cut([*held, span], limit)
            chunk, held = held[:count], held[count:]
            yield _padded(chunk, before, (held or [span])[0].start, limit, pad)
            before = chunk[-1].end
        held.append(span)
    if held:
        yield _padded(held, before, held[-1].end + 2 * pad, limit, pad)


def _best_cut(spans: list[Span], limit: int) -> int:
    """How many spans, not all, make the chunk that ends at the longest silence in its second half."""
    silences = {
        count: after.start - last.end
        for count, (last, after) in enumerate(pairwise(spans), start=1)
        if last.end - spans[0].start >= limit / 2
    }
    return max(silences, key=silences.__getitem__) if silences else len(spans) - 1


def _padded(spans: list[Span], before: int, after: int, limit: int, pad: int) -> Span:
    start, end = spans[0].start, spans[-1].end
    if end - start <= limit:
        pad = min(pad, (limit - (end - start)) // 2)
    return Span(start - min(pad, start, (start - before) // 2), end + min(pad, (after - end) // 2))
