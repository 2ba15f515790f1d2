"""Cut audio at silences into chunks that each fit into one window, or fill windows with several of them.

speech   ▄▄▄▄▄▄  ▄▄▄▄     ▄▄▄▄▄▄▄ ▄▄▄        ▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄
chunks  |─────────────|  |──────────────|   |─────────────────────────|
limit   |──────────────────|
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from whisperport.speech.audio.vad import Span


def cut_chunks(
    speech: Iterable[Span], limit: int, *, pad: int = 0, longest_silence: int | None = None
) -> Iterator[Span]:
    """Yield chunks that contain all speech, in order and without overlap.

    Args:
        speech: spans of speech in order.
        limit: maximum length of a chunk in mel frames of 10 ms. A single longer span is one chunk.
        pad: mel frames of silence before and after a chunk's speech, or half of the silence if it is
            shorter.
        longest_silence: maximum silence within a chunk, in mel frames; None: no limit.
    """
    held: list[Span] = []  # spans that fit into one chunk, or one span that does not
    before = -2 * pad  # end of the previous speech; at first far enough to have no effect
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


def fill_windows(chunks: Iterable[Span], limit: int) -> Iterator[tuple[Span, ...]]:
    """Yield groups of neighbouring chunks. Without the silence between them, a group fits into a window.

    Args:
        chunks: in order.
        limit: maximum length of a group in mel frames of 10 ms. A single longer chunk is one group.
    """
    held: list[Span] = []
    for chunk in chunks:
        if held and sum(span.n_frames for span in held) + chunk.n_frames > limit:
            yield tuple(held)
            held = []
        held.append(chunk)
    if held:
        yield tuple(held)


def _best_cut(spans: list[Span], limit: int) -> int:
    """Return how many of the spans make a chunk that ends at the longest silence in its second half."""
    silences = {
        count: after.start - last.end
        for count, (last, after) in enumerate(pairwise(spans), start=1)
        if last.end - spans[0].start >= limit / 2
    }
    return max(silences, key=silences.__getitem__) if silences else len(spans) - 1


def _padded(spans: list[Span], before: int, after: int, limit: int, pad: int) -> Span:
    """Return the chunk of spans with its padding; `before` and `after` bound the silence around it."""
    start, end = spans[0].start, spans[-1].end
    if end - start <= limit:
        pad = min(pad, (limit - (end - start)) // 2)
    return Span(start - min(pad, start, (start - before) // 2), end + min(pad, (after - end) // 2))
