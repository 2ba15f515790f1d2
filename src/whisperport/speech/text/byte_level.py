"""GPT-2's mapping of bytes to printable characters, in which BPE vocabularies are written.

Each of the 256 bytes has one character. Printable Latin-1 bytes map to themselves, the 68 others to U+0100
and the following characters, so a space is "Ġ". Source: openai/gpt-2, src/encoder.py, bytes_to_unicode.

`first_unknown_merge` checks that the merges of a byte-level tokenizer fit its vocabulary.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]

CHAR_OF_BYTE = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + position) for position, byte in enumerate(_OTHERS)
}
BYTE_OF_CHAR = {char: byte for byte, char in CHAR_OF_BYTE.items()}


def to_byte_characters(token: bytes) -> str:
    """Map bytes to characters: b" caf\\xc3\\xa9" becomes "ĠcafÃ©"."""
    return "".join(CHAR_OF_BYTE[byte] for byte in token)


def from_byte_characters(token: str) -> bytes:
    """Map characters to bytes.

    Raises:
        KeyError: a character is not one of the 256.
    """
    return bytes(BYTE_OF_CHAR[char] for char in token)


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
