"""Keep exporters from copying what they do not change: the weights of a program and its nodes' history.

Exporters copy an exported program with `copy.deepcopy` before they change its graph. They do not change
the weights in it, so the copies may share them. ExecuTorch 1.5.1 makes two such copies of every program.

torch.fx records for each node from which node and in which pass it was made
(`torch.fx.traceback.NodeSource`). In each pass it copies this record with all earlier records. Records do
not change either. Without `shared_node_history`, the copies are 29 s of the 144 s of CPU time for lowering
Whisper tiny's `step` to XNNPACK.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch.fx.traceback import NodeSource

_CLASSES = (torch.Tensor, torch.nn.Parameter)  # not their subclasses, such as fake tensors
_lock = RLock()


@contextmanager
def shared_weights() -> Iterator[None]:
    """Within the block, `copy.deepcopy` of a tensor on the CPU returns the tensor itself.

    This holds for the process, so one block runs at a time.
    """
    with _lock:
        original: dict[type, Any] = {cls: cls.__deepcopy__ for cls in _CLASSES}

        def shared(tensor: Any, memo: Any) -> Any:
            if type(tensor) in original and tensor.device.type == "cpu":
                return tensor
            cls = torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else torch.Tensor
            return original[cls](tensor, memo)

        try:
            for cls in _CLASSES:
                cls.__deepcopy__ = shared  # type: ignore[method-assign]
            yield
        finally:
            for cls in _CLASSES:
                cls.__deepcopy__ = original[cls]  # type: ignore[method-assign]


@contextmanager
def shared_node_history() -> Iterator[None]:
    """Make copies of node records return the record itself, inside the `with` block."""
    if "__deepcopy__" in vars(NodeSource):  # an outer block or another thread has done this
        yield
        return
    NodeSource.__deepcopy__ = _itself  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del NodeSource.__deepcopy__  # type: ignore[attr-defined]


def _itself(record: Any, memo: Any) -> Any:
    return record
