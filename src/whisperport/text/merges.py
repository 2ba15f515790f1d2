"""Check that the merges of a byte-level tokenizer fit its vocabulary."""

from collections.abc import Mapping, Sequence
from itertools import chain


def first_unknown_merge(
    vocabulary: Mapping[str, object], merges: Sequence[tuple[str, str]]
) -> tuple[str, str] | None:
    """Return the first pair with a part or a merged token that is not in the vocabulary, or None.

    With some vocabularies the `tokenizers` library panics on such a pair: it raises an exception that is
    not a subclass of `Exception`.
    """
    known = vocabulary.keys()
    if known >= {*chain.from_iterable(merges)} and known >= {*map("".join, merges)}:
        return None
    for left, right in merges:
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            return left, right
    return None
