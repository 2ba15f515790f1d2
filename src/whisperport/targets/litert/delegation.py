"""Ask LiteRT which nodes of a program XNNPACK runs.

LiteRT lists the nodes of a file's first subgraph only. To list another one, the two entries in the file's
table of subgraphs are exchanged, and exchanged again afterwards.
"""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whisperport.targets.tflite_runner import TfliteFile

SUBGRAPHS = (
    8  # offset of `Model.subgraphs` in the table's index, as flatc generates it for schema.fbs
)


def xnnpack_delegation(path: Path, program: str) -> dict[str, Any]:
    """Return what XNNPACK runs of a program, as JSON for the manifest.

    Args:
        path: a .tflite file that this process wrote.
        program: key of the program's signature.
    """
    from whisperport.inspection.litert_run import listed_ops
    from whisperport.inspection.profile_tflite import DELEGATE, replaced
    from whisperport.inspection.tflite_signatures import read_signatures

    signature = read_signatures(path)[program]
    with _as_first(path, signature.subgraph):
        ops = listed_ops(TfliteFile(path, 1, extra="litert").interpreter)
    nodes = [op for op in ops if op.name != DELEGATE]
    calls = [op for op in ops if op.name == DELEGATE]
    taken = {index for call in calls for index in replaced(call, nodes)}
    return {
        "delegated": len(taken),
        "subgraphs": len(calls),
        "undelegated": [op.name for op in nodes if op.index not in taken],
    }


@contextmanager
def _as_first(path: Path, subgraph: int) -> Iterator[None]:
    """Within the block, the file's first subgraph is another one; signatures do not fit it."""
    if subgraph == 0:
        yield
        return
    _exchange(path, subgraph)
    try:
        yield
    finally:
        _exchange(path, subgraph)


def _exchange(path: Path, subgraph: int) -> None:
    """Exchange the first entry of the table of subgraphs with another. An entry is an offset to itself."""
    from tflite.Model import Model

    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        model = Model()
        model.Init(data, struct.unpack_from("<I", data)[0])
        start = model._tab.Vector(model._tab.Offset(SUBGRAPHS))
        places = (start, start + 4 * subgraph)
        first, other = (place + struct.unpack_from("<I", data, place)[0] for place in places)
        struct.pack_into("<I", data, places[0], other - places[0])
        struct.pack_into("<I", data, places[1], first - places[1])
