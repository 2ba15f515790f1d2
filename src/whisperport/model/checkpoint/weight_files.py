"""Find, read and hash the weight files of a Hugging Face folder.

`read_safetensors` reads an untrusted file: it checks the header, then maps the tensors to memory. Layout:
8 bytes little-endian header length n, n bytes of JSON {name: {dtype, shape, data_offsets}}, then the
tensors. https://huggingface.co/docs/safetensors, "Format"
"""

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from whisperport.errors import CheckpointError
from whisperport.model.checkpoint.pickled_file import plain_tensors, read_pickled
from whisperport.program.bundle.folder import file_sha256
from whisperport.program.untrusted import (
    PLACEHOLDER_BYTES,
    quoted,
    read_json_object,
    reject_placeholder,
    shorten,
)

# In order of preference: one file before shards, original precision before half, safetensors before pickle.
_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model.fp16.safetensors",
    "model.safetensors.index.fp16.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The tensors of a folder under their names in the files."""

    tensors: Mapping[str, Tensor]
    sha256: Mapping[str, str]  # file name -> SHA-256 digest in hexadecimal


def find_weights(folder: Path) -> Path | None:
    """Return the preferred weight file or index of shards; None: the folder has none."""
    return next((folder / name for name in _FILES if (folder / name).is_file()), None)


def read_weights(folder: Path) -> StoredWeights:
    """Read the weights of a folder.

    Raises:
        CheckpointError: the folder has no supported weight file, or a file cannot be read.
    """
    path = find_weights(folder)
    if path is None:
        raise _no_weights(folder)
    files = _shards(path) if path.suffix == ".json" else [path]
    tensors: dict[str, Tensor] = {}
    for file in files:
        _add(tensors, file)
    return StoredWeights(tensors, {file.name: file_sha256(file) for file in files})


def _no_weights(folder: Path) -> CheckpointError:
    what = f"no weights in `{folder}`"
    broken_link = next((name for name in _FILES if (folder / name).is_symlink()), None)
    if broken_link is not None:
        return CheckpointError(
            what,
            why=f"its {broken_link} is a link to {os.readlink(folder / broken_link)}, which does not exist",
            hint="download the checkpoint again, or copy it with `cp -rL`, which copies the linked files",
        )
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    return CheckpointError(
        what,
        why=f"it has none of {', '.join(_FILES)}"
        + (f"; it has {', '.join(names[:6])}" if names else ""),
        hint="copy model.safetensors.index.json, which lists them, into the folder"
        if any("-of-" in name for name in names)
        else "save the checkpoint with transformers' `save_pretrained`",
    )


def _add(tensors: dict[str, Tensor], file: Path) -> None:
    for name, tensor in read_tensors(file).items():
        if name in tensors:
            raise CheckpointError(
                f"cannot read the weights in `{file.parent}`",
                why=f"the tensor `{shorten(name)}` is in two of its files",
                hint="save the checkpoint again with transformers' `save_pretrained`",
            )
        tensors[name] = tensor


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors or .bin file under its own names, memory-mapped if possible.

    Raises:
        CheckpointError: the file cannot be read, or holds more than tensors.
    """
    if path.suffix != ".bin":
        return read_safetensors(path)
    state = read_pickled(path)
    if not isinstance(state, dict):
        raise CheckpointError(
            f"cannot read `{path.name}` in `{path.parent}`",
            why=f"it holds a {type(state).__name__}; expected a state_dict",
            hint="save the checkpoint again with transformers' `save_pretrained`",
        )
    return plain_tensors(state, where=str(path))


def _shards(index: Path) -> list[Path]:
    """Return the files that an index lists. They must be in its folder and have one suffix."""
    what = f"cannot use `{index.name}` in `{index.parent}`"
    hint = "save the checkpoint again with transformers' `save_pretrained`"
    names = read_json_object(index).get("weight_map")
    suffix = ".bin" if ".bin." in index.name else ".safetensors"
    if not isinstance(names, dict) or not names:
        raise CheckpointError(what, why="it has no `weight_map`", hint=hint)
    shards: dict[str, Path] = {}
    for name in names.values():
        if not isinstance(name, str) or not name.endswith(suffix) or set(name) & {"/", "\\", "\0"}:
            raise CheckpointError(
                what,
                why=f"{quoted(name)} is not the name of a {suffix} file in its folder",
                hint=hint,
            )
        shards[name] = index.parent / name
    absent = [name for name, path in shards.items() if not path.is_file()]
    if absent:
        listed = ", ".join(shorten(name) for name in absent[:6])
        raise CheckpointError(
            what, why=f"{len(absent)} of its {len(shards)} files are missing: {listed}", hint=hint
        )
    return [shards[name] for name in sorted(shards)]


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
    wrong_dtypes = {
        name: entry.get("dtype") if isinstance(entry, dict) else entry
        for name, entry in header.items()
        if not (isinstance(entry, dict) and entry.get("dtype") in _DTYPES)
    }
    if wrong_dtypes:
        name, dtype = next(iter(wrong_dtypes.items()))
        raise CheckpointError(
            what,
            why=f"`{shorten(name)}` is of dtype {quoted(dtype)}; expected F32, F16 or BF16 "
            f"(tensors with another dtype: {len(wrong_dtypes)})",
            hint="give a checkpoint that is not quantized",
        )


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"`{shorten(twice)}` occurs twice")
    return members
