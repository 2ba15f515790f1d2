"""How many objects a pickle stands for, counted from its instructions before anything is loaded.

A pickle of a hundred bytes may hold a tuple that holds the same tuple twice, forty levels deep. As the
name of a tensor it is hashed, which takes hours, and no signal interrupts it.
"""

import io
import pickletools
import zipfile
from pathlib import Path
from typing import IO, Any

MOST_OBJECTS = 5_000_000  # Whisper large's checkpoint stands for some 50,000
MOST_BYTES = 64 * 2**20  # of the instructions; those of Whisper large take 0.2 MB
PICKLES = 5  # at the beginning of a file that torch wrote before it wrote zip archives
_ZIP = b"PK\x03\x04"
_MARK = -1


class TooManyObjectsError(ValueError):
    """A pickle stands for more objects than any checkpoint."""


def check_pickles(path: Path) -> None:
    """Check each pickle that `torch.load` would read from a file.

    Raises:
        TooManyObjectsError: one is too large.
        ValueError, LookupError, zipfile.BadZipFile: one is damaged.
    """
    with path.open("rb") as file:
        _check_file(file)


def check_pickled_bytes(data: bytes) -> None:
    """As `check_pickles`, of a file's contents."""
    _check_file(io.BytesIO(data))


def _check_file(file: IO[bytes]) -> None:
    is_archive = file.read(len(_ZIP)) == _ZIP  # as torch itself tells the two apart
    file.seek(0)
    if not is_archive:
        for _ in range(PICKLES):
            if not file.read(1):  # a file of fewer pickles: torch says what is wrong with it
                return
            file.seek(-1, io.SEEK_CUR)
            check_pickle(file)
        return
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.filename.endswith(".pkl"):
                if member.file_size > MOST_BYTES:
                    raise TooManyObjectsError(f"its pickle takes {member.file_size} bytes")
                with archive.open(member) as pickled:
                    check_pickle(pickled)


def check_pickle(file: IO[bytes]) -> None:
    """Check the pickle at a file's position; afterwards the file is behind it. Raises as above."""
    stack: list[int] = []  # the number of objects that each entry stands for
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
            taken = 1 + sum(_taken(opcode, stack))
            if taken > MOST_OBJECTS:
                raise TooManyObjectsError(f"its pickle stands for more than {MOST_OBJECTS} objects")
            stack.extend(taken for _ in opcode.stack_after)


def _taken(opcode: pickletools.OpcodeInfo, stack: list[int]) -> list[int]:
    """What an instruction takes off the stack."""
    taken = []
    for kind in reversed(opcode.stack_before):
        if kind is pickletools.stackslice:
            while stack[-1] != _MARK:
                taken.append(stack.pop())
        elif kind is pickletools.markobject:
            stack.pop()
        else:
            taken.append(stack.pop())
    return taken
