"""A lowered program that is ready to run: named arrays in, named arrays out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import BundleError
from whisperport.process import OwnProcess, keep_in_forks
from whisperport.spec import ProgramSpec

Array = NDArray[Any]

Turn = AbstractContextManager[Any]
"""Held while a program runs: a lock, or `nullcontext()` for a runtime that runs in parallel."""


class Runner(ABC):
    """One loaded program. A target implements `_run`; callers use `run`, from any thread.

    Args:
        turn: held while `_run` runs. Runners that share memory must share one lock. None: a lock of this
            runner's own, so that this program runs in one thread at a time.
    """

    def __init__(self, spec: ProgramSpec, turn: Turn | None = None) -> None:
        self.spec = spec
        self.turn: Turn = Lock() if turn is None else turn
        self._process = OwnProcess()
        keep_in_forks(self)
        self._inputs = tuple((t.name, t.shape, np.dtype(t.dtype)) for t in spec.inputs)
        self._outputs = tuple((t.name, t.shape, np.dtype(t.dtype)) for t in spec.outputs)

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
            BundleError: the program returned an output of another shape or dtype than it states.
            ForkError: this is a fork of the process that loaded the program.
        """
        self._process.check(f"the program `{self.spec.name}`")  # before `turn`: a fork copies locks
        feed = []
        for name, shape, dtype in self._inputs:
            array = inputs.get(name)
            if array is None or array.shape != shape or array.dtype != dtype:
                raise ValueError(self._complaint(name, array, shape, dtype))
            feed.append(np.asarray(array, order="C"))
        with self.turn:
            outputs = self._run(feed)
        found = {}
        for (name, shape, dtype), array in zip(self._outputs, outputs, strict=True):
            if array.shape != shape or array.dtype != dtype:
                raise BundleError(
                    f"the program {self.spec.name!r} returned {name!r} as {array.shape} {array.dtype}",
                    why=f"it states {shape} {dtype}",
                    hint="export the bundle again",
                )
            found[name] = array
        return found

    def _complaint(
        self, name: str, array: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> str:
        wanted = f"{self.spec.name!r} expects {name!r} as {shape} {dtype}"
        return wanted + (", got nothing" if array is None else f", got {array.shape} {array.dtype}")

    @abstractmethod
    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        """Run on inputs in the order of `spec.inputs`; return outputs in the order of `spec.outputs`."""
