"""Runners of tests: scripted ones, and programs that run in torch."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.program import Program
from whisperport.program.generation import Generation
from whisperport.program.runner import Array, Binding, Part, Runner
from whisperport.runtime import Cache, Engine
from whisperport.runtime.engine.scores import Scores

from ..fake_target import OverwritingBinding
from ..micro import DIMS, GENERATION

# A decoder for tests of decoding, whose every token is known beforehand.

FEATURES = np.zeros((DIMS.n_audio_ctx, DIMS.n_audio_state), np.float32)


class Scripted:
    """A decoder that emits a script: row i of the script after i tokens, or else `second`.

    It is its own engine.
    """

    joined_prompt = 0

    def __init__(
        self, script: list[int], generation: Generation = GENERATION, second: int | None = None
    ) -> None:
        self.dims, self.generation, self.cache = DIMS, generation, Cache(DIMS)
        self.window, self.latest_timestamp = None, None
        self.engine = self
        self.script, self.second, self.prompts = script, second, []

    def start_window(self, features: Any) -> None:
        self.n_decoded = 0

    def prefill(self, tokens: Any, *, second_index: int = 0) -> Any:
        self.prompts.append(list(tokens))
        return self._row(), np.zeros(DIMS.n_vocab, np.float32)

    def step(self, token: int, cache: Any = None) -> Any:
        self.n_decoded += 1
        return self._row()

    def step_all(self, steps: Any) -> Any:
        return [Scores(self.step(step.token, step.cache)) for step in steps]

    def copies(self) -> Any:
        return nullcontext(self.cache.copy)

    def _row(self) -> Any:
        row = np.zeros(DIMS.n_vocab, np.float32)
        if self.second is not None:
            row[self.second] = 15.0
        row[self.script[min(self.n_decoded, len(self.script) - 1)]] = 20.0
        return row


# Runners over traced programs of the micro model, which record what their bindings are told.


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
