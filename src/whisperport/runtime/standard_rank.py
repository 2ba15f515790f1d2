"""Run a program of the `rank4` variant as one of the usual form: the same arrays with fewer axes.

The two forms differ in leading axes of size 1 only, so an array of one form is a view of an array of the
other: no input, no part of a cache and no output is copied.
"""

from collections.abc import Sequence
from typing import final

from whisperport.program.runner import Array, Binding, Part, Runner
from whisperport.program.signatures import standard_form


def in_standard_form(runner: Runner) -> Runner:
    """Return a runner whose signature is in the usual form: `runner` itself if its signature is."""
    spec = standard_form(runner.spec)
    return runner if spec == runner.spec else _StandardRunner(runner)


@final
class _StandardRunner(Runner):
    """A runner of the usual form, over one whose arrays have further leading axes."""

    def __init__(self, inner: Runner) -> None:
        super().__init__(standard_form(inner.spec), inner.run_lock)
        self.inner = inner
        self.given = [tensor.shape for tensor in inner.spec.inputs]
        self._returned = [tensor.shape for tensor in self.spec.outputs]

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        given = [array.reshape(shape) for array, shape in zip(inputs, self.given, strict=True)]
        return self.returned(self.inner._run(given))

    def binding(self) -> Binding:
        return _StandardBinding(self)

    def returned(self, outputs: Sequence[Array]) -> list[Array]:
        """Check the outputs of the inner runner, and return them in the usual form."""
        checked = self.inner.named(outputs).values()
        return [array.reshape(shape) for array, shape in zip(checked, self._returned, strict=True)]


@final
class _StandardBinding(Binding):
    """A binding that binds views of its arrays to the inner runner."""

    def __init__(self, runner: _StandardRunner) -> None:
        super().__init__(runner)
        self._standard, self._inner = runner, runner.inner.binding()
        self._given: list[Array | None] = [None] * len(runner.given)
        ranks = zip(runner.inner.spec.inputs, runner.spec.inputs, strict=True)
        self._leading = {
            own.name: (slice(None),) * (len(inner.shape) - len(own.shape)) for inner, own in ranks
        }

    @property
    def copies(self) -> bool:
        return self._inner.copies

    def changed(self, name: str, part: Part) -> None:
        self._inner.changed(name, (*self._leading[name], *part))

    def _bind(self, name: str, array: Array) -> None:
        index = self._index[name]
        self._given[index] = view = array.reshape(self._standard.given[index])
        self._inner.bind(name, view)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        given: list[Array] = [
            inputs[index].reshape(self._standard.given[index]) if array is None else array
            for index, array in enumerate(self._given)
        ]
        return self._standard.returned(self._inner._run(given))
