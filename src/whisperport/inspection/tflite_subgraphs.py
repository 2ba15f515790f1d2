"""Make another program of a `.tflite` file the one that LiteRT runs without a signature.

LiteRT lists and profiles the nodes of a file's first subgraph only.
"""

import mmap
import shutil
import struct
from pathlib import Path
from typing import Any

from whisperport.errors import ProgramError

# Offsets of fields in the index of the root table, as flatc generates them for schema.fbs.
SUBGRAPHS, SIGNATURES = 8, 18


def exchange(path: Path, subgraph: int) -> None:
    """Exchange the first subgraph of a file with another one. Signatures then name the wrong subgraphs.

    Args:
        path: a valid .tflite file, which is changed in place.
        subgraph: index of the other subgraph; 0 changes nothing.
    """
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        table = _root(data)
        start = table.Vector(table.Offset(SUBGRAPHS))
        places = (start, start + 4 * subgraph)
        # An entry is the distance from itself to its subgraph.
        first, other = (place + struct.unpack_from("<I", data, place)[0] for place in places)
        struct.pack_into("<I", data, places[0], other - places[0])
        struct.pack_into("<I", data, places[1], first - places[1])


def copy_of_program(path: Path, subgraph: int, out: Path) -> None:
    """Copy a file such that one of its subgraphs is the first, and without signatures.

    Args:
        path: a valid .tflite file.
        subgraph: index of the subgraph.
        out: the copy.

    Raises:
        ProgramError: the file is damaged.
    """
    shutil.copyfile(path, out)
    try:
        _make_first(out, subgraph)
    except (struct.error, ValueError, TypeError, IndexError) as error:
        raise ProgramError(
            f"{path.name} is damaged",
            why=f"{type(error).__name__}: {error}"[:200],
            hint="convert the model again",
        ) from error


def _make_first(out: Path, subgraph: int) -> None:
    exchange(out, subgraph)
    with out.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        root = _root(data).Pos
        index = root - struct.unpack_from("<i", data, root)[0]
        if struct.unpack_from("<H", data, index)[0] > SIGNATURES:
            struct.pack_into("<H", data, index + SIGNATURES, 0)  # the field is absent


def _root(data: mmap.mmap) -> Any:
    from flatbuffers.table import Table

    return Table(data, struct.unpack_from("<I", data)[0])
