"""Keep exporters from copying the weights of a program with its graph.

Exporters copy an exported program with `copy.deepcopy` before they change its graph. They do not change
the weights in it, so the copies may share them. ExecuTorch 1.5.1 makes two such copies of every program.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch

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
