"""Ask LiteRT which nodes of a program XNNPACK runs.

LiteRT lists the nodes of a file's first subgraph only. To list another one, the two entries in the file's
table of subgraphs are exchanged, and exchanged again afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whisperport.targets.tflite.runner import TfliteFile


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
    from whisperport.inspection.tflite_subgraphs import exchange

    exchange(path, subgraph)
    try:
        yield
    finally:
        exchange(path, subgraph)
