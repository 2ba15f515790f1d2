"""Whether the merges of a byte-level tokenizer fit its vocabulary."""

from collections.abc import Collection, Iterable


def first_unknown_merge(
    vocabulary: Collection[str], merges: Iterable[tuple[str, str]]
) -> tuple[str, str] | None:
    """The first pair that is not in the vocabulary, or whose joined token is not; None: all fit.

    The `tokenizers` library panics on such a pair in some vocabularies, with an exception that does not
    derive from `Exception`.
    """
    for left, right in merges:
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            return left, right
    return None
