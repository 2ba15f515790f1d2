"""Count the objects that a pickle represents from its instructions, before it is loaded.

A pickle of a hundred bytes can hold a tuple that contains the same tuple twice, forty levels deep. If
such a tuple is the name of a tensor, hashing it takes hours and no signal interrupts it.
"""

import io
import pickletools
import zipfile
from pathlib import Path
from typing import IO, Any

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
    for opcode, given, _ in pickletools.genops(file):
        argument: Any = given
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
