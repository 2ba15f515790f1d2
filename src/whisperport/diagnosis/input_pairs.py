"""Choose which two mistakes with the input to try together: each pair costs a run of the encoder."""

from collections.abc import Iterator, Sequence

from whisperport.diagnosis.causes import CauseCode
from whisperport.diagnosis.expected import Alternative

LEADING = 3  # mistakes that are combined with every other one


def likely_pairs(ranked: Sequence[Alternative]) -> Iterator[tuple[Alternative, Alternative]]:
    """Yield pairs of mistakes that one input can have, the most likely first.

    The output for an input with two mistakes is most similar to that for the mistake that changes the input
    most. So the leading mistakes are combined with all others. A transposed spectrogram is similar to
    nothing, whatever it was made of; it is combined with all others, too.

    Args:
        ranked: the mistakes, those whose output is most similar to the file first.
    """
    leading = [*ranked[:LEADING], *(a for a in ranked if a.cause is CauseCode.MEL_TRANSPOSED)]
    done: list[Alternative] = []
    for first in dict.fromkeys(leading):
        done.append(first)
        for second in ranked:
            if second not in done and not first.excludes(second):
                yield first, second
