"""GPT-2's spelling of bytes as printable characters, in which BPE vocabularies are written.

Each of the 256 bytes has one character: printable Latin-1 stands for itself, the 68 others are
counted up from U+0100, so a space is "Ġ". Source: openai/gpt-2, src/encoder.py, bytes_to_unicode.
"""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]

CHAR_OF_BYTE = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + position) for position, byte in enumerate(_OTHERS)
}
BYTE_OF_CHAR = {char: byte for byte, char in CHAR_OF_BYTE.items()}


def to_byte_characters(token: bytes) -> str:
    """b" caf\\xc3\\xa9" becomes "ĠcafÃ©"."""
    return "".join(CHAR_OF_BYTE[byte] for byte in token)


def from_byte_characters(token: str) -> bytes:
    """The reverse of `to_byte_characters`. Raises KeyError for a character outside the 256."""
    return bytes(BYTE_OF_CHAR[char] for char in token)
