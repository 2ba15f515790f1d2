"""Make text safe to show: escape characters that control a terminal or a line-based format.

Unsafe characters are control characters (C0, DEL, C1), line and paragraph separators, bidirectional
embeddings, overrides and isolates, and surrogates, which represent bytes of file names that are not UTF-8.
Right-to-left text, its marks (LRM, RLM) and joiners (ZWJ, ZWNJ) are safe.
"""

import re

_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_SPACES = str.maketrans(dict.fromkeys("\t\n\v\f\r\x85\u2028\u2029", " "))


def is_printable(text: str) -> bool:
    """Return whether a text has no unsafe character."""
    return _UNSAFE.search(text) is None


def printable(text: str) -> str:
    r"""Replace every unsafe character by a visible escape, such as `\x1b`, `\n` or `\u202e`."""
    return _UNSAFE.sub(_visible, text)


def one_line(text: str) -> str:
    """Replace line breaks and tabs by spaces, and escape other unsafe characters."""
    return printable(text.translate(_SPACES))


def escaped_json(document: str) -> str:
    r"""Replace unsafe characters in a document of `json.dumps` by JSON's `\u` escapes."""
    return _UNSAFE.sub(_as_json, document)


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name that is not UTF-8, see `os.fsdecode`
        code -= 0xDC00
    return _SHORT.get(match[0]) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def _as_json(match: re.Match[str]) -> str:
    # A line feed separates the lines of an indented document.
    return "\n" if match[0] == "\n" else f"\\u{ord(match[0]):04x}"
