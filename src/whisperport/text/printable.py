"""Text that is safe to show: characters that a terminal or a line-based format obeys are escaped.

Unsafe are control characters (C0, DEL, C1), the line and paragraph separators, the bidirectional
embeddings, overrides and isolates, and surrogates, which stand for the bytes of names that are not
UTF-8. Right-to-left text, its marks (LRM, RLM) and joiners (ZWJ, ZWNJ) are ordinary text.
"""

import re

_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_SPACES = str.maketrans(dict.fromkeys("\t\n\v\f\r\x85\u2028\u2029", " "))


def is_printable(text: str) -> bool:
    """Whether no character of it has to be escaped."""
    return _UNSAFE.search(text) is None


def printable(text: str) -> str:
    r"""`text` with every unsafe character as a visible escape, such as `\x1b`, `\n` or `\u202e`."""
    return _UNSAFE.sub(_visible, text)


def one_line(text: str) -> str:
    """`text` on one line: line breaks and tabs are spaces, other unsafe characters are escaped."""
    return printable(text.translate(_SPACES))


def escaped_json(document: str) -> str:
    r"""A JSON document, as `json.dumps` gives it, with unsafe characters as JSON's `\u` escapes."""
    return _UNSAFE.sub(_as_json, document)


def _visible(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a name that is not UTF-8, see `os.fsdecode`
        code -= 0xDC00
    return _SHORT.get(found[0]) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def _as_json(found: re.Match[str]) -> str:
    return (
        "\n" if found[0] == "\n" else f"\\u{ord(found[0]):04x}"
    )  # between lines of an indented one
