"""Targets for tests. A minimal one writes each program's name to a file, and runs the torch module.

An export takes 0.1 s instead of half a minute. The target can return wrong outputs on request.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.program.bundle import ProgramEntry
from whisperport.program.bundle.program_entry import ProgramFacts
from whisperport.program.placement import Placement
from whisperport.program.runner import Array, Binding, Runner
from whisperport.program.spec import ProgramSpec, TargetSpec
from whisperport.system.progress import begin_stage
from whisperport.targets import RunOptions, Target


@dataclass
class FakeTarget(Target):
    """A target that runs torch modules. `wrong`: program -> output -> function applied to the output."""

    spec: TargetSpec
    runners: dict[str, Runner]  # eager ones
    wrong: dict[str, dict[str, Any]] = field(default_factory=dict)
    failure: BaseException | None = None  # raised in the middle of lowering
    precisions: dict[str, str] = field(default_factory=dict)

    def check(self, program: Any) -> list[Any]:
        return []

    def with_precisions(self, precisions: Mapping[str, str]) -> "FakeTarget":
        other = copy(self)
        other.precisions = dict(precisions)
        return other

    def lower(self, programs: Sequence[Any], folder: Path) -> list[ProgramEntry]:
        (folder / self.spec.name).mkdir()
        entries = []
        for program in programs:
            begin_stage(f"{program.name} to {self.spec.name}")
            file = f"{self.spec.name}/{program.name}.txt"
            (folder / file).write_text(program.name)
            if self.failure is not None:
                raise self.failure
            facts = ProgramFacts(delegated=1, subgraphs=1, undelegated=())
            entries.append(
                ProgramEntry(
                    spec=program.spec,
                    placement=Placement(self.spec.name, self.precisions.get(program.name, "fp32")),
                    method=program.name,
                    files=(file,),
                    facts=facts,
                )
            )
        return entries

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        names = [(folder / entry.files[0]).read_text() for entry in entries]
        return {
            entry.spec.name: _Fake(
                entry.spec, self.runners[name], self.wrong.get(entry.spec.name, {})
            )
            for entry, name in zip(entries, names, strict=True)
        }


class _Fake(Runner):
    def __init__(self, spec: ProgramSpec, eager: Runner, wrong: dict[str, Any]) -> None:
        super().__init__(spec)
        self._eager, self._wrong = eager, wrong

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        names = [tensor.name for tensor in self._eager.spec.inputs]
        outputs = self._eager.run(dict(zip(names, inputs, strict=True)))
        return [
            np.asarray(self._wrong.get(name, lambda x: x)(output), np.float32)
            for name, output in outputs.items()
        ]


def fake(name: str, runners: dict[str, Runner], **how: Any) -> FakeTarget:
    """A fake target called `name`."""
    spec = TargetSpec(name=name, summary="nothing is compiled")
    return FakeTarget(spec, runners, **how)


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
