"""Runners over traced programs of the micro model, which record what their bindings are told."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.program import Program
from whisperport.program.runner import Array, Binding, Part, Runner
from whisperport.runtime import Engine

from ..micro import DIMS, GENERATION
from ..overwriting import OverwritingBinding


class TorchRunner(Runner):
    """Runs a traced program in torch; its bindings record what they are told."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.spec)
        self.call: Any = program.exported.module(check_guards=False)
        self.bindings: list[RecordingBinding] = []

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        single: list[Any] = []
        layered: dict[str, list[torch.Tensor]] = {}
        for tensor, array in zip(self.spec.inputs, inputs, strict=True):
            kind, _, layer = tensor.name.rpartition("_")
            if layer.isdigit():
                layered.setdefault(kind, []).append(torch.from_numpy(array))
            else:
                single.append(torch.from_numpy(array))
        with torch.no_grad():
            outputs = self.call(*single, *layered.values())
        return (
            [output.numpy() for output in outputs]
            if isinstance(outputs, tuple)
            else [outputs.numpy()]
        )

    def binding(self) -> Binding:
        self.bindings.append(RecordingBinding(self))
        return self.bindings[-1]


class RecordingBinding(OverwritingBinding):
    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.bound: dict[str, Array] = {}
        self.parts: list[tuple[str, Part]] = []

    def _bind(self, name: str, array: Array) -> None:
        self.bound[name] = array

    def changed(self, name: str, part: Part) -> None:
        self.parts.append((name, part))


def engine_of(micro: Whisper, programs: Mapping[str, Program]) -> tuple[Engine, dict[str, Any]]:
    """An engine over traced programs, and its runners by name."""
    tables = (micro.decoder.token_embedding.weight, micro.decoder.positional_embedding)
    runners = {name: TorchRunner(program) for name, program in programs.items()}
    return Engine(DIMS, GENERATION, runners, *(t.numpy() for t in tables)), runners
