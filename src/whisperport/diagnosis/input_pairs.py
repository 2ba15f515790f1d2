"""Choose which two mistakes with the input to try together: each pair costs a run of the encoder."""

from collections.abc import Iterator, Sequence

from whisperport.diagnosis.causes import CauseCode
from whisperport.diagnosis.expected import Alternative

LEADING = 3  # mistakes that are combined with every other one


def likely_pairs(ranked: Sequence[Alternative]) -> Iterator[tuple[Alternative, Alternative]]:
    """Yield pairs of mistakes that one input can have, the most likely first.

    The output for an input with two mistakes is most similar to that for the mistake that changes the input
    most. So the leading mistakes are combined with all others. A transposed spectrogram and one of silence
    are similar to nothing, whatever else is wrong; they are combined with all others, too. Neither mistake
    may lead if another window of another clip was given, so that all of these pairs follow.

    Args:
        ranked: the mistakes, those whose output is most similar to the file first.
    """
    leading = [*ranked[:LEADING], *filter(_is_similar_to_nothing, ranked)]
    done: list[Alternative] = []
    for first in dict.fromkeys(leading):
        done.append(first)
        for second in ranked:
            if second not in done and not first.excludes(second):
                yield first, second
    windows = [a for a in ranked if a.cause is CauseCode.OTHER_WINDOW and a not in done]
    for clip in (a for a in ranked if a.clip and a not in done):
        yield from ((clip, window) for window in windows)


def _is_similar_to_nothing(alternative: Alternative) -> bool:
    """Return whether another mistake changes the output completely."""
    if alternative.cause is CauseCode.SILENT_INPUT:
        return alternative.mistake is not None and alternative.mistake.is_of_samples
    return alternative.cause is CauseCode.MEL_TRANSPOSED
