"""Read a file written by `torch.save` without running code in it.

`check_pickle` counts the objects that a pickle represents from its instructions, before it is loaded. A
pickle of a hundred bytes can hold a tuple that contains the same tuple twice, forty levels deep. If such
a tuple is the name of a tensor, hashing it takes hours and no signal interrupts it.
"""

import io
import pickletools
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch
from torch import Tensor

from whisperport.errors import CheckpointError
from whisperport.program.untrusted import PLACEHOLDER_BYTES, reject_placeholder, shorten
from whisperport.system.array_files import UnpacksToMoreError, check_unpacked_size

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


MAX_OBJECTS = 5_000_000  # Whisper large's checkpoint has about 50,000
MAX_PICKLE_BYTES = 64 * 2**20  # size of the instructions; Whisper large's have 0.2 MB
PICKLES = 5  # number of pickles at the start of a file in torch's format from before zip archives
_ZIP = b"PK\x03\x04"
_MARK = -1


class TooManyObjectsError(ValueError):
    """A pickle represents more objects than any checkpoint has."""


def check_pickles(path: Path) -> None:
    """Check each pickle that `torch.load` would read from a file.

    Raises:
        TooManyObjectsError: a pickle represents too many objects.
        ValueError, LookupError, zipfile.BadZipFile: a pickle is damaged.
    """
    with path.open("rb") as file:
        _check_file(file)


def check_pickled_bytes(data: bytes) -> None:
    """Check the pickles in a file's contents; see `check_pickles`."""
    _check_file(io.BytesIO(data))


def _check_file(file: IO[bytes]) -> None:
    is_archive = file.read(len(_ZIP)) == _ZIP  # the same test as torch's
    file.seek(0)
    if not is_archive:
        for _ in range(PICKLES):
            if not file.read(1):  # the file has fewer pickles: torch reports the error
                return
            file.seek(-1, io.SEEK_CUR)
            check_pickle(file)
        return
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.filename.endswith(".pkl"):
                if member.file_size > MAX_PICKLE_BYTES:
                    raise TooManyObjectsError(f"its pickle has {member.file_size} bytes")
                with archive.open(member) as pickled:
                    check_pickle(pickled)


def check_pickle(file: IO[bytes]) -> None:
    """Check the pickle at a file's position, and move the position to its end.

    Raises:
        TooManyObjectsError, ValueError, LookupError: see `check_pickles`.
    """
    stack: list[int] = []  # number of objects that each entry represents
    memo: dict[int, int] = {}
    for opcode, operand, _ in pickletools.genops(file):
        argument: Any = operand
        name = opcode.name
        if name == "MARK":
            stack.append(_MARK)
        elif name == "DUP":
            stack.append(stack[-1])
        elif "GET" in name:
            stack.append(memo[int(argument)])
        elif "PUT" in name:
            memo[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        else:
            count = 1 + sum(_pop_operands(opcode, stack))
            if count > MAX_OBJECTS:
                raise TooManyObjectsError(f"its pickle represents more than {MAX_OBJECTS} objects")
            stack.extend(count for _ in opcode.stack_after)


def _pop_operands(opcode: pickletools.OpcodeInfo, stack: list[int]) -> list[int]:
    """Remove the operands of an instruction from the stack, and return them."""
    operands = []
    for kind in reversed(opcode.stack_before):
        if kind is pickletools.stackslice:
            while stack[-1] != _MARK:
                operands.append(stack.pop())
        elif kind is pickletools.markobject:
            stack.pop()
        else:
            operands.append(stack.pop())
    return operands
