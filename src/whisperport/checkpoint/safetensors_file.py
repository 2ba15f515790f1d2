"""Read an untrusted safetensors file: check its header, then memory-map its tensors.

Layout: 8 bytes little-endian header length n, n bytes of JSON {name: {dtype, shape, data_offsets}},
then the tensors. https://huggingface.co/docs/safetensors, "Format"
"""

import json
import struct
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from whisperport.checkpoint.placeholder import PLACEHOLDER_BYTES, reject_placeholder
from whisperport.checkpoint.sizes import quoted, shorten
from whisperport.errors import CheckpointError

_MAX_HEADER_BYTES = 8 << 20  # bytes; large-v3's header has less than 200 KB
_DTYPES = ("F32", "F16", "BF16")
_HINT = "download the file again, or save the checkpoint again"


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file under its own names, as views of the memory-mapped file.

    Raises:
        CheckpointError: the file is missing, truncated, not safetensors or inconsistent, or has a dtype
            other than float32, float16 and bfloat16.
    """
    what = f"cannot read `{path.name}` in `{path.parent}`"
    try:
        _check_header(path, what)
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except OSError as error:
        raise CheckpointError(what, why=error.strerror or str(error), hint=_HINT) from error
    # The library compares offsets with shapes and with the file size. Its errors have several types.
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise CheckpointError(what, why=shorten(str(error)), hint=_HINT) from error


def _check_header(path: Path, what: str) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(PLACEHOLDER_BYTES)
        reject_placeholder(head, what)
        if len(head) < 8:
            raise CheckpointError(what, why=f"it has {size} bytes, less than a header", hint=_HINT)
        (length,) = struct.unpack("<Q", head[:8])
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                what,
                why=f"its header length is {length} bytes, and the file has {size}: it is truncated, or "
                "it is not a safetensors file",
                hint=_HINT,
            )
        file.seek(8)
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_reject_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(what, why=f"its header is damaged: {error}", hint=_HINT) from error
    if not isinstance(header, dict):
        raise CheckpointError(what, why="its header is not a JSON object", hint=_HINT)
    header.pop("__metadata__", None)
    others = {
        name: entry.get("dtype") if isinstance(entry, dict) else entry
        for name, entry in header.items()
        if not (isinstance(entry, dict) and entry.get("dtype") in _DTYPES)
    }
    if others:
        name, dtype = next(iter(others.items()))
        raise CheckpointError(
            what,
            why=f"`{shorten(name)}` is of dtype {quoted(dtype)}; expected F32, F16 or BF16 "
            f"(tensors with another dtype: {len(others)})",
            hint="give a checkpoint that is not quantized",
        )


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"`{shorten(twice)}` occurs twice")
    return found
