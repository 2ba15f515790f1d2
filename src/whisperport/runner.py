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
from whisperport.signatures import roles
from whisperport.spec import ProgramSpec

Array = NDArray[Any]

Turn = AbstractContextManager[Any]
"""Held while a program runs: a lock, or `nullcontext()` for a runtime that runs in parallel."""

Part = tuple[slice, ...]
"""An index that selects a part of an array."""


class Runner(ABC):
    """One loaded program. A target implements `_run`; callers use `run` and `binding`, from any thread.

    Args:
        turn: held while the program runs. Runners that share memory must share one lock. None: a lock of
            this runner's own, so that this program runs in one thread at a time.

    Attributes:
        roles: the role of every input, by its name; see `whisperport.signatures.roles`.
    """

    def __init__(self, spec: ProgramSpec, turn: Turn | None = None) -> None:
        self.spec = spec
        self.roles = roles(spec)
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
        self.check_process()
        feed = [self.checked(index, inputs.get(t[0])) for index, t in enumerate(self._inputs)]
        with self.turn:
            outputs = self._run(feed)
        return self.named(outputs)

    def binding(self) -> "Binding":
        """A new binding, with nothing bound. A target that has memory of its own returns its own class."""
        return Binding(self)

    @abstractmethod
    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        """Run on inputs in the order of `spec.inputs`; return outputs in the order of `spec.outputs`."""

    @final
    def check_process(self) -> None:
        """Raise ForkError in a fork of the process that loaded the program.

        It comes before `turn` is taken: a fork copies locks, held ones too.
        """
        self._process.check(f"the program `{self.spec.name}`")

    @final
    def checked(self, index: int, array: Array | None) -> Array:
        """An array for the input at `index` of `spec.inputs`, C-contiguous.

        Raises:
            ValueError: it is missing, or of another shape or dtype.
        """
        name, shape, dtype = self._inputs[index]
        if array is None or array.shape != shape or array.dtype != dtype:
            found = "nothing" if array is None else f"{array.shape} {array.dtype}"
            raise ValueError(f"{self.spec.name!r} expects {name!r} as {shape} {dtype}, got {found}")
        return np.asarray(array, order="C")

    @final
    def named(self, outputs: Sequence[Array]) -> dict[str, Array]:
        """The outputs of one run by their names.

        Raises:
            BundleError: one has another shape or dtype than `spec` states.
        """
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


class Binding:
    """A program with arrays bound to its constants and its state: a run needs its other inputs only.

    A binding belongs to one call and is used by one thread at a time; any number of bindings share a
    runner. Who binds an array keeps to its role:

    constant  Nobody writes to the array as long as it is bound.
    state     Its owner may write to the array between runs, and then calls `changed` before the next run.

    So a target may copy what is bound to its device once, and afterwards only the parts that changed. It
    derives its own class, which implements `_bind`, `changed` and `_run`. This class copies nothing: every
    run reads the bound arrays in place, together with those that it is given.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        names = [tensor.name for tensor in runner.spec.inputs]
        self._open = dict(enumerate(names))  # inputs to which nothing is bound
        self._index = {name: index for index, name in enumerate(names)}
        self._feed: list[Any] = [None] * len(names)  # an array for each input, in their order

    @final
    def bind(self, name: str, array: Array) -> None:
        """Use `array` as this input of every run from now on, in place of what was bound before.

        Args:
            array: of exactly the input's shape and dtype. An array of state must be C-contiguous.

        Raises:
            ValueError: no input has this name, its role is `input`, or the array is another one than it
                expects.
        """
        role = self.runner.roles.get(name)
        if role not in ("constant", "state"):
            raise ValueError(f"{self.runner.spec.name!r} has no constant and no state {name!r}")
        index = self._index[name]
        found = self.runner.checked(index, array)
        if role == "state" and not array.flags.c_contiguous:  # a copy would miss later changes
            raise ValueError(f"the array for the state {name!r} is not C-contiguous")
        self._feed[index] = found
        self._open.pop(index, None)
        self._bind(name, found)

    def changed(self, name: str, part: Part) -> None:
        """Say that `array[part]` of the array bound to a state was written to since the last run."""

    @final
    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run once, on what is bound and on these inputs.

        Args:
            inputs: one array for each input to which nothing is bound, as for `Runner.run`; others are
                ignored.

        Returns:
            One array per output, which later runs do not overwrite.

        Raises:
            ValueError, BundleError, ForkError: as for `Runner.run`.
        """
        runner = self.runner
        runner.check_process()
        for index, name in self._open.items():
            self._feed[index] = runner.checked(index, inputs.get(name))
        with runner.turn:
            outputs = self._run(self._feed)
        return runner.named(outputs)

    def _bind(self, name: str, array: Array) -> None:
        """Take an array to where the program reads it."""

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        """As `Runner._run`: `inputs` holds every input, what is bound too."""
        return self.runner._run(inputs)
