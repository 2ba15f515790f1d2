"""A binding whose runs overwrite the outputs of the run before, as those of a target may."""

from collections.abc import Sequence

from whisperport.program.runner import Array, Binding, Runner


class OverwritingBinding(Binding):
    """Returns the same arrays in every run."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._own: list[Array] = []

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        outputs = super()._run(inputs)
        if not self._own:
            self._own = [array.copy() for array in outputs]
        for own, array in zip(self._own, outputs, strict=True):
            own[...] = array
        return self._own
