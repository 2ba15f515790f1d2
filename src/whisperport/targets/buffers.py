"""Runners with buffers of their own: a binding copies to them only what they do not hold yet."""

from abc import abstractmethod
from collections.abc import Sequence
from weakref import ReferenceType, ref

from whisperport.program.runner import Array, Binding, Part, RunLock, Runner
from whisperport.program.spec import ProgramSpec


class BufferedRunner(Runner):
    """A program whose inputs are copied to buffers that keep them between runs."""

    def __init__(self, spec: ProgramSpec, lock: RunLock | None = None) -> None:
        super().__init__(spec, lock)
        self.holder: ReferenceType[Binding] | None = None  # whose arrays the buffers hold

    def binding(self) -> Binding:
        """Return a binding that copies bound arrays once, and then what changed of them."""
        return BufferedBinding(self)

    @abstractmethod
    def write(self, index: int, array: Array, part: Part = ()) -> None:
        """Copy a part of an input, `spec.inputs[index]`, to its buffer."""

    @abstractmethod
    def execute(self) -> Sequence[Array]:
        """Run the program on its buffers; return copies of its outputs."""

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        self.holder = None
        for index, array in enumerate(inputs):
            self.write(index, array)
        return self.execute()


class BufferedBinding(Binding):
    """Copies to the buffers only what they do not hold yet. All bindings of a runner share its buffers."""

    def __init__(self, runner: BufferedRunner) -> None:
        super().__init__(runner)
        self._buffered = runner
        self._missing: set[int] = set()  # bound inputs that the buffers do not hold
        self._parts: dict[
            int, list[Part]
        ] = {}  # input -> its parts that changed since the last run

    def changed(self, name: str, part: Part) -> None:
        self._parts.setdefault(self._index[name], []).append(part)

    def _bind(self, name: str, array: Array) -> None:
        self._missing.add(self._index[name])

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        holder = self._buffered.holder
        is_held = holder is not None and holder() is self
        self._buffered.holder = None  # until this run has succeeded
        for index, array in enumerate(inputs):
            if not is_held or index in self._unbound or index in self._missing:
                self._buffered.write(index, array)
            else:
                for part in self._parts.get(index, ()):
                    self._buffered.write(index, array, part)
        outputs = self._buffered.execute()
        self._missing.clear()
        self._parts.clear()
        self._buffered.holder = ref(self)
        return outputs
