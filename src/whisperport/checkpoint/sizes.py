"""Sizes a file states, made into `Dims` only when every one of them is possible."""

import reprlib
from collections.abc import Mapping

from whisperport.dims import LARGEST, Dims
from whisperport.errors import CheckpointError


def checked_dims(sizes: Mapping[str, object], *, what: str, words: Mapping[str, str]) -> Dims:
    """Dims from values that may be anything; `words` gives the file's own word for a field.

    Raises CheckpointError, saying `what` could not be read and listing every size at fault.
    """
    faults = []
    for field, largest in LARGEST.items():
        size, word = sizes[field], words.get(field, field)
        if isinstance(size, bool) or not isinstance(size, int):
            faults.append(f"`{word}` is {quoted(size)}; expected a whole number")
        elif not 1 <= size <= largest:
            faults.append(f"`{word}` is {quoted(size)}; expected 1 to {largest}")
    hint = "the file is damaged, or is not a Whisper's"
    if faults:
        raise CheckpointError(what, why="; ".join(faults), hint=hint)
    try:
        return Dims.from_json(dict(sizes))
    except ValueError as error:
        raise CheckpointError(what, why=str(error), hint=hint) from error


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxdict = 3, 16


def quoted(value: object) -> str:
    """A value from an untrusted file as Python writes it, short enough for a message.

    A pickle of a hundred bytes may hold lists inside of lists that Python would write for hours.
    """
    if isinstance(value, int) and value.bit_length() > 200:  # Python does not print very long ones
        return f"a number of {value.bit_length()} bits"
    if not isinstance(value, dict | list | tuple | set | frozenset):
        return shortened(repr(value))
    try:
        return shortened(_BRIEF.repr(value))
    except ValueError:  # a very long number is in it
        return f"a {type(value).__name__}"


def shortened(text: str) -> str:
    """A name from a hostile file, printable and short enough for a message."""
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 160 else f"{text[:157]}..."
