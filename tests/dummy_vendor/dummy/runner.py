"""Run a compiled file on the device, which keeps constants and states in its own memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import final

from whisperport.program.runner import Array, Binding, Part, Runner
from whisperport.program.spec import ProgramSpec
from whisperport.targets.vendors.dummy.artifact import check_artifact


@final
class DummyRunner(Runner):
    """A compiled program on the device. This class simulates the device."""

    def __init__(self, spec: ProgramSpec, path: Path, chip: str) -> None:
        super().__init__(spec)
        import onnxruntime

        program = check_artifact(path, chip, spec).program
        self._session = onnxruntime.InferenceSession(program)

    def binding(self) -> Binding:
        return DummyBinding(self)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        names = [tensor.name for tensor in self.spec.inputs]
        outputs: Sequence[Array] = self._session.run(
            [tensor.name for tensor in self.spec.outputs], dict(zip(names, inputs, strict=True))
        )
        return outputs


@final
class DummyBinding(Binding):
    """Sends an array to the device when it is bound; later sends only the parts that have changed."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._host: dict[str, Array] = {}
        self._device: dict[str, Array] = {}
        self.sent = 0  # bytes of bound arrays that were sent

    def changed(self, name: str, part: Part) -> None:
        self._device[name][part] = self._host[name][part]
        self.sent += self._host[name][part].nbytes

    def _bind(self, name: str, array: Array) -> None:
        self._host[name], self._device[name] = array, array.copy()
        self.sent += array.nbytes

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        names = [tensor.name for tensor in self.runner.spec.inputs]
        return super()._run([self._device.get(n, a) for n, a in zip(names, inputs, strict=True)])
