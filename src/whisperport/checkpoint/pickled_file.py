"""Read a file written by `torch.save` without running anything in it."""

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
from whisperport.checkpoint.sizes import shortened
from whisperport.errors import CheckpointError
from whisperport.unpacking import UnpacksToMoreError, check_unpacked_size

# Torch's own words when its restricted unpickler meets anything but tensors and plain data.
_CODE = re.compile(r"GLOBAL ([\w.]+)|reduce for unrecognized function (.+)")


def read_pickled(path: Path) -> Any:
    """Whatever plain data and tensors the file holds; tensors are mapped if stored uncompressed.

    Raises CheckpointError when it is missing, damaged, or holds code; code is never run.
    """
    what = f"cannot read `{path.name}` in `{path.parent}`"
    try:
        with path.open("rb") as file:
            reject_placeholder(file.read(PLACEHOLDER_BYTES), what)
    except OSError as error:
        raise CheckpointError(
            what,
            why=error.strerror or str(error),
            hint="check the path, and that the file may be read",
        ) from error
    try:
        check_pickles(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=_is_mappable(path))
    # A damaged file fails anywhere inside torch's reader, with nearly every built-in exception.
    except Exception as error:
        if isinstance(error, UnpicklingError) and (code := _CODE.search(str(error))):
            raise CheckpointError(
                f"`{path.name}` in `{path.parent}` contains code, which was not run",
                why=f"besides weights it asks for `{shortened(code[1] or code[2])}`",
                hint="save tensors, numbers and text alone (`model.state_dict()`, `vars(model.dims)`), or "
                "give the same checkpoint as safetensors",
            ) from error
        if "TorchScript" in str(error):
            raise CheckpointError(
                f"`{path.name}` in `{path.parent}` is a TorchScript program, not a checkpoint",
                why="it holds a graph that was exported already",
                hint="give the checkpoint it was made from",
            ) from error
        raise CheckpointError(
            what,
            why=f"it is damaged, or was not written by torch.save: {_reason(error)}",
            hint="download the file again, or save the checkpoint again",
        ) from error


def plain_tensors(state: Mapping[Any, Any], *, where: str) -> dict[str, Tensor]:
    """The entries of a state_dict; raises CheckpointError if one is not a dense CPU tensor."""
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
                why=f"`{shortened(str(name))}` is not a plain tensor but {_kind(value)}",
                hint="save the model's state_dict alone",
            )
        tensors[name] = value.detach()
    return tensors


def _is_mappable(path: Path) -> bool:
    """Only a zip file with nothing compressed in it can be mapped; torch writes that since 1.6."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        check_unpacked_size(archive, path.stat().st_size)
        return all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())


def _reason(error: Exception) -> str:
    """Torch's reason without its advice to switch the restriction off."""
    if isinstance(error, UnpacksToMoreError | TooManyObjectsError):
        return str(error)
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip()
    return shortened(text.splitlines()[0]) if text else type(error).__name__


def _kind(value: object) -> str:
    if isinstance(value, Tensor) and value.is_quantized:
        return f"a quantized tensor, {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu":
        return f"a tensor of shape {tuple(value.shape)} that repeats fewer numbers"
    if isinstance(value, Tensor):
        return f"a tensor of layout {value.layout} on {value.device.type}"
    return type(value).__name__
