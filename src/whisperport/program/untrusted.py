"""What readers of untrusted files share: JSON objects, sizes, texts short enough for a message.

Small text files that a wrong download wrote in place of weights are recognized here too.
"""

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whisperport.errors import CheckpointError
from whisperport.program.dims import LARGEST, Dims

_MAX_BYTES = 8 << 20  # the longest such file, large-v3's generation_config.json, has less than 4 KB
PLACEHOLDER_BYTES = 64  # number of bytes at the start of a file that identify such a text


def read_json_object(path: Path, *, max_bytes: int = _MAX_BYTES) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: the file.
        max_bytes: maximum size of the file.

    Raises:
        CheckpointError: the file is missing, too large, not JSON, or not an object.
    """
    what = f"cannot read `{path.name}` in `{path.parent}`"
    hint = "download the file again, or save the checkpoint again"
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise CheckpointError(
                what, why=f"it has {size} bytes; the maximum is {max_bytes}", hint=hint
            )
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(what, why=error.strerror or str(error), hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(what, why=f"it is not JSON: {error}", hint=hint) from error
    if not isinstance(data, dict):
        raise CheckpointError(
            what, why=f"expected a JSON object, found {type(data).__name__}", hint=hint
        )
    return data


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


def reject_placeholder(head: bytes, what: str) -> None:
    """Reject a Git LFS pointer or a web page in place of a weight file.

    Args:
        head: the first `PLACEHOLDER_BYTES` of the file.
        what: what happened, for the error.

    Raises:
        CheckpointError: the file is one of them.
    """
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            what,
            why="it is a Git LFS pointer, not the weights",
            hint="run `git lfs pull` in the folder",
        )
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise CheckpointError(
            what,
            why="it is a web page, such as an error or a login page, not the weights",
            hint="download the file again; on the hub, its address contains `/resolve/`, not `/blob/`",
        )
