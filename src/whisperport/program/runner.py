"""Runners of lowered programs: arrays by input name in, arrays by output name out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import BundleError
from whisperport.program.signatures import roles
from whisperport.program.spec import ProgramSpec
from whisperport.system.process import OwnProcess, keep_in_forks

Array = NDArray[Any]

RunLock = AbstractContextManager[Any]
"""A lock that is held while a program runs; `nullcontext()` for a runtime that allows parallel runs."""

Part = tuple[slice, ...]
"""An index that selects a part of an array."""


class Runner(ABC):
    """One loaded program. A target implements `_run`; callers use `run` and `binding`, from any thread.

    Args:
        spec: the program's signature.
        run_lock: the lock that is held while the program runs. Runners that share memory must share one
            lock. Default: None, a separate lock for this runner, so that this program runs in one thread
            at a time.

    Attributes:
        roles: input name -> role; see `whisperport.program.signatures.roles`.
        free_axes: name -> the axis that may be shorter than `spec` states. Of a program with caches: every
            `self_k_i` and `self_v_i`, all with room for the same number of tokens, and `mask`. Of a
            program with audio, such as `encoder`: its input and each output. Empty if none may.
        writes_in_place: whether `run_into` is faster than `run` and a copy of its outputs.
    """

    free_axes: Mapping[str, int] = {}
    writes_in_place = False

    def __init__(self, spec: ProgramSpec, run_lock: RunLock | None = None) -> None:
        self.spec = spec
        self.roles = roles(spec)
        self.run_lock: RunLock = Lock() if run_lock is None else run_lock
        self._process = OwnProcess()
        keep_in_forks(self)
        self._inputs = tuple((t.name, t.shape, np.dtype(t.dtype)) for t in spec.inputs)
        self._output_names = [tensor.name for tensor in spec.outputs]
        self._output_forms = [(tensor.shape, np.dtype(tensor.dtype)) for tensor in spec.outputs]

    @final
    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the program once.

        Args:
            inputs: input name -> array, for every input of `spec`, of exactly its shape and dtype.
                The axes in `free_axes` may be shorter. C-contiguous arrays are read in place; other
                arrays are copied.

        Returns:
            Output name -> array, for every output of `spec`. Later runs do not overwrite these arrays.

        Raises:
            ValueError: an input is missing, or has the wrong shape or dtype.
            BundleError: the program returned an output with a shape or dtype other than `spec` states.
            ForkError: the current process is a fork of the process that loaded the program.
        """
        feed = self._feed(inputs)
        with self.run_lock:
            outputs = self._run(feed)
        return self.named(outputs)

    @final
    def run_into(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Run the program once, and write its outputs to arrays of the caller.

        Args:
            inputs: as for `run`.
            outputs: output name -> C-contiguous array, for every output of `spec`, of exactly its shape and
                dtype.

        Raises:
            ValueError: an input or an output is missing, or has the wrong shape, dtype or memory order.
            BundleError, ForkError: as for `run`.
        """
        feed = self._feed(inputs)
        arrays = [outputs[name] for name in self._output_names if name in outputs]
        forms = [(array.shape, array.dtype) for array in arrays]
        if forms != self._output_forms or not all(array.flags.c_contiguous for array in arrays):
            raise ValueError(f"the arrays for the outputs of {self.spec.name!r} have another form")
        with self.run_lock:
            self._run_into(feed, arrays)

    def binding(self) -> "Binding":
        """Return a new `Binding` with nothing bound; a target with device memory returns a subclass."""
        return Binding(self)

    @abstractmethod
    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        """Run on inputs in the order of `spec.inputs`; return outputs in the order of `spec.outputs`."""

    def _feed(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Check the process and the inputs, and return these in the order of `spec.inputs`."""
        self.check_process()
        return [self.checked(index, inputs.get(t[0])) for index, t in enumerate(self._inputs)]

    def _run_into(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Run as `_run` does, and write the outputs to arrays."""
        results = self.named(self._run(inputs)).values()
        for array, output in zip(results, outputs, strict=True):
            output[...] = array

    @final
    def check_process(self) -> None:
        """Raise ForkError if the current process is a fork of the process that loaded the program.

        Call this before acquiring `run_lock`: a fork copies locks, including locks that are held.
        """
        if not self._process.is_current:
            self._process.check(f"the program `{self.spec.name}`")

    @final
    def checked(self, index: int, array: Array | None) -> Array:
        """Return `array` as a C-contiguous array for the input `spec.inputs[index]`.

        Raises:
            ValueError: the array is None, or has the wrong shape or dtype.
        """
        name, shape, dtype = self._inputs[index]
        fits = array is not None and array.dtype == dtype
        if array is None or not fits or not self._fits(name, shape, array.shape):
            description = "nothing" if array is None else f"{array.shape} {array.dtype}"
            raise ValueError(
                f"{self.spec.name!r} expects {name!r} as {shape} {dtype}, got {description}"
            )
        return np.asarray(array, order="C")

    def _fits(self, name: str, stated: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Return whether a shape is the stated one of an input or output, or shorter in its free axis."""
        if shape == stated:
            return True
        axis = self.free_axes.get(name)
        if axis is None or len(shape) != len(stated) or not 0 < shape[axis] < stated[axis]:
            return False
        return shape == (*stated[:axis], shape[axis], *stated[axis + 1 :])

    @final
    def named(self, outputs: Sequence[Array]) -> dict[str, Array]:
        """Return the outputs of one run as a dictionary: output name -> array.

        Raises:
            BundleError: an output has a shape or dtype other than `spec` states.
        """
        forms = [(array.shape, array.dtype) for array in outputs]
        if forms != self._output_forms:
            self._check_shorter(forms)
        return dict(zip(self._output_names, outputs, strict=True))

    def _check_shorter(self, forms: Sequence[tuple[Any, Any]]) -> None:
        """Check that outputs differ from the signature in nothing but the length of their free axes."""
        stated = zip(self._output_names, self._output_forms, forms, strict=True)
        for name, (shape, dtype), form in stated:
            if form[1] != dtype or not self._fits(name, shape, form[0]):
                raise BundleError(
                    f"the program {self.spec.name!r} returned {name!r} as {form[0]} {form[1]}",
                    why=f"its signature states {shape} {dtype}",
                    hint="export the bundle again",
                )


class Binding:
    """A program with arrays bound to its constant and state inputs; a run takes the other inputs only.

    A binding serves one call, such as the transcription of one audio file, and is used by one thread at a
    time. Any number of bindings can share a runner. The caller that binds an array follows these rules:

    constant  Nobody writes to the array while it is bound.
    state     The caller may write to the array between runs. If the binding `copies`, the caller then calls
              `changed` before the next run. It always does so for the audio of a row of a batch.

    A target can therefore copy bound arrays to its device once, and later copy only the changed parts. Such
    a target subclasses `Binding` and implements `_bind`, `changed` and `_run`. This base class copies
    nothing: every run reads the bound arrays in place.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        names = [tensor.name for tensor in runner.spec.inputs]
        self._unbound = dict(enumerate(names))  # index -> name, of inputs that have no array bound
        self._index = {name: index for index, name in enumerate(names)}
        self._feed: list[Any] = [None] * len(names)  # one array per input, in signature order
        self._outputs: Sequence[Array] | None = None  # of the last run
        self._named: dict[str, Array] = {}

    @final
    def bind(self, name: str, array: Array) -> None:
        """Use `array` as the input `name` of every following run; it replaces an array bound before.

        Args:
            name: name of an input with the role `constant` or `state`.
            array: an array of exactly the input's shape and dtype. The array of a `state` input must be
                C-contiguous.

        Raises:
            ValueError: no input has this name, the input's role is `input`, or the array has the wrong
                shape, dtype or memory order.
        """
        role = self.runner.roles.get(name)
        if role not in ("constant", "state"):
            raise ValueError(f"{self.runner.spec.name!r} has no constant or state input {name!r}")
        index = self._index[name]
        contiguous = self.runner.checked(index, array)
        if role == "state" and not array.flags.c_contiguous:  # a copy would miss later changes
            raise ValueError(f"the array for the state input {name!r} is not C-contiguous")
        self._feed[index] = contiguous
        self._unbound.pop(index, None)
        self._bind(name, contiguous)

    @property
    def copies(self) -> bool:
        """Whether `changed` must be called: the target may have copied the bound arrays."""
        return type(self).changed is not Binding.changed

    def changed(self, name: str, part: Part) -> None:
        """Report that a part of the array bound to the state `name` was written since the last run."""

    @final
    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run the program once on the bound arrays and on `inputs`.

        Args:
            inputs: input name -> array, for every input that has no array bound, as for `Runner.run`.
                Other names are ignored.

        Returns:
            Output name -> array. The next run of this binding may overwrite these arrays.

        Raises:
            ValueError, BundleError, ForkError: as for `Runner.run`.
        """
        runner = self.runner
        runner.check_process()
        for index, name in self._unbound.items():
            array = inputs.get(name)
            if array is None or array is not self._feed[index]:
                self._feed[index] = runner.checked(index, array)
        with runner.run_lock:
            outputs = self._run(self._feed)
        if outputs is not self._outputs:
            self._outputs, self._named = outputs, runner.named(outputs)
        return self._named

    def _bind(self, name: str, array: Array) -> None:
        """Make a bound array available to the program, for example copy it to the device."""

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        """Run as `Runner._run` does; `inputs` holds every input, including the bound arrays.

        A target that writes to the same arrays in every run returns the same list of them.
        """
        return self.runner._run(inputs)
