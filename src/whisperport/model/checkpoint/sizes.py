"""Check the sizes in a checkpoint file, and shorten untrusted values for error messages."""

import reprlib
from collections.abc import Mapping

from whisperport.errors import CheckpointError
from whisperport.program.dims import LARGEST, Dims


def checked_dims(sizes: Mapping[str, object], *, what: str, keys: Mapping[str, str]) -> Dims:
    """Convert sizes from an untrusted file to `Dims`.

    Args:
        sizes: field of `Dims` -> value of any type.
        what: what happened if a size is wrong, for the error.
        keys: field of `Dims` -> its key in the file, where the two differ.

    Raises:
        CheckpointError: a size is not a number or out of range. The error lists all of them.
    """
    faults = []
    for field, largest in LARGEST.items():
        size, key = sizes[field], keys.get(field, field)
        if isinstance(size, bool) or not isinstance(size, int):
            faults.append(f"`{key}` is {quoted(size)}; expected a whole number")
        elif not 1 <= size <= largest:
            faults.append(f"`{key}` is {quoted(size)}; expected 1 to {largest}")
    hint = "the file is damaged, or it is not a Whisper model's: give another checkpoint"
    if faults:
        raise CheckpointError(what, why="; ".join(faults), hint=hint)
    try:
        return Dims(**{name: size for name, size in sizes.items() if isinstance(size, int)})
    except ValueError as error:
        raise CheckpointError(what, why=str(error), hint=hint) from error


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxdict = 3, 16


def quoted(value: object) -> str:
    """Return the `repr` of a value from an untrusted file, shortened for a message.

    A pickle of a hundred bytes can hold nested lists whose complete `repr` would take hours.
    """
    if (
        isinstance(value, int) and value.bit_length() > 200
    ):  # Python does not convert very long numbers to text
        return f"a number of {value.bit_length()} bits"
    if not isinstance(value, dict | list | tuple | set | frozenset):
        return shorten(repr(value))
    try:
        return shorten(_REPR.repr(value))
    except ValueError:  # the value contains a very long number
        return f"a {type(value).__name__}"


def shorten(text: str) -> str:
    """Return text from an untrusted file, made printable and shortened for a message."""
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 160 else f"{text[:157]}..."
