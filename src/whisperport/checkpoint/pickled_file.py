"""Read a file written by `torch.save` without running code in it."""

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from whisperport.checkpoint.pickle_size import TooManyObjectsError, check_pickles
from whisperport.checkpoint.placeholder import PLACEHOLDER_BYTES, reject_placeholder
from whisperport.checkpoint.sizes import shorten
from whisperport.errors import CheckpointError
from whisperport.system.unpacking import UnpacksToMoreError, check_unpacked_size

# torch's message when its restricted unpickler finds anything except tensors and plain data.
_CODE = re.compile(r"GLOBAL ([\w.]+)|reduce for unrecognized function (.+)")


def read_pickled(path: Path) -> Any:
    """Read the plain data and tensors of a file. Uncompressed tensors are memory-mapped.

    Raises:
        CheckpointError: the file is missing, damaged, or contains code. Code is never run.
    """
    what = f"cannot read `{path.name}` in `{path.parent}`"
    try:
        with path.open("rb") as file:
            reject_placeholder(file.read(PLACEHOLDER_BYTES), what)
    except OSError as error:
        raise CheckpointError(
            what,
            why=error.strerror or str(error),
            hint="check the path and the permissions of the file",
        ) from error
    try:
        check_pickles(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=_is_mappable(path))
    # A damaged file makes torch's reader raise almost any built-in exception.
    except Exception as error:
        if isinstance(error, UnpicklingError) and (code := _CODE.search(str(error))):
            raise CheckpointError(
                f"`{path.name}` in `{path.parent}` contains code, which was not run",
                why=f"besides weights, it needs `{shorten(code[1] or code[2])}`",
                hint="save only tensors, numbers and text (`model.state_dict()`, `vars(model.dims)`), or "
                "give the same checkpoint as safetensors",
            ) from error
        if "TorchScript" in str(error):
            raise CheckpointError(
                f"`{path.name}` in `{path.parent}` is a TorchScript program, not a checkpoint",
                why="it holds an exported graph",
                hint="give the original checkpoint",
            ) from error
        raise CheckpointError(
            what,
            why=f"it is damaged, or it was not written by torch.save: {_torch_reason(error)}",
            hint="download the file again, or save the checkpoint again",
        ) from error


def plain_tensors(state: Mapping[Any, Any], *, where: str) -> dict[str, Tensor]:
    """Return the tensors of a state_dict; `where` names it in errors.

    Raises:
        CheckpointError: an entry is not a dense CPU tensor.
    """
    tensors = {}
    for name, value in state.items():
        if (
            not isinstance(name, str)
            or not isinstance(value, Tensor)
            or value.layout != torch.strided
            or value.device.type != "cpu"
            or value.is_quantized
            or value.numel() * value.element_size() > value.untyped_storage().nbytes()
        ):
            raise CheckpointError(
                f"`{where}` holds more than weights",
                why=f"`{shorten(str(name))}` is not a plain tensor but {_kind(value)}",
                hint="save only the model's state_dict",
            )
        tensors[name] = value.detach()
    return tensors


def _is_mappable(path: Path) -> bool:
    """Return whether a file is a zip archive without compression, as torch writes it since 1.6."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        check_unpacked_size(archive, path.stat().st_size)
        return all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())


def _torch_reason(error: Exception) -> str:
    """Return torch's reason without its advice to allow code."""
    if isinstance(error, UnpacksToMoreError | TooManyObjectsError):
        return str(error)
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip()
    return shorten(text.splitlines()[0]) if text else type(error).__name__


def _kind(value: object) -> str:
    if isinstance(value, Tensor) and value.is_quantized:
        return f"a quantized tensor, {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu":
        return f"a tensor of shape {tuple(value.shape)} whose storage holds fewer numbers"
    if isinstance(value, Tensor):
        return f"a tensor of layout {value.layout} on {value.device.type}"
    return type(value).__name__
