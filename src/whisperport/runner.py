"""A lowered program that is ready to run: named arrays in, named arrays out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from threading import Lock
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from whisperport.spec import ProgramSpec

Array = NDArray[Any]


class Runner(ABC):
    """One loaded program. A target fills in `_run`; callers use `run`, from any thread."""

    concurrent: ClassVar[bool] = False  # `_run` may be called while it runs in another thread

    def __init__(self, spec: ProgramSpec) -> None:
        self.spec = spec
        self._turn = nullcontext() if self.concurrent else Lock()
        self._inputs = tuple((t.name, t.shape, np.dtype(t.dtype)) for t in spec.inputs)
        self._outputs = tuple(t.name for t in spec.outputs)

    @final
    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run once.

        Args:
            inputs: one array per input of `spec`, of exactly its shape and dtype. Arrays that are
                C-contiguous are read in place, others are copied.

        Returns:
            One array per output of `spec`, which later runs do not overwrite.

        Raises:
            ValueError: an input is missing, or of another shape or dtype.
        """
        feed = []
        for name, shape, dtype in self._inputs:
            array = inputs.get(name)
            if array is None or array.shape != shape or array.dtype != dtype:
                raise ValueError(self._complaint(name, array, shape, dtype))
            feed.append(np.asarray(array, order="C"))
        with self._turn:
            outputs = self._run(feed)
        return dict(zip(self._outputs, outputs, strict=True))

    def _complaint(
        self, name: str, array: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> str:
        wanted = f"{self.spec.name!r} expects {name!r} as {shape} {dtype}"
        return wanted + (", got nothing" if array is None else f", got {array.shape} {array.dtype}")

    @abstractmethod
    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        """Run on inputs in the order of `spec.inputs`; return outputs in the order of `spec.outputs`."""
