"""The dummy's compiler: options, calibration set, simulation, stages, and the accuracy in its logs."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, final

from whisperport.program.dims import Dims
from whisperport.program.runner import Array
from whisperport.program.spec import ProgramSpec
from whisperport.system.atomic import write_atomic
from whisperport.targets.compiler import (
    CalibrationNeed,
    CompilePlan,
    Compiler,
    CompileRequest,
    EmulationNeed,
    Explanation,
)
from whisperport.targets.target_options import Option
from whisperport.targets.toolchain import Stage
from whisperport.targets.vendors.dummy import stages
from whisperport.targets.vendors.dummy.artifact import SUFFIX, check_artifact


@dataclass(frozen=True, slots=True, kw_only=True)
class DummyOptions:
    """Options for compiling, such as `--option dummy1.samples=8`."""

    samples: Annotated[int, Option("Number of calibration samples", low=1)] = 64
    percentile: Annotated[
        int, Option("Percentile of absolute values that ranges must cover", low=90, high=100)
    ] = 100


def flat(array: Array) -> Array:
    """Flatten a calibration sample to one row, the layout that this compiler expects."""
    return array.reshape(1, -1)


@final
class DummyCompiler(Compiler):
    """The compiler for one chip."""

    title = "the dummy's compiler"
    toolchain: ClassVar[str] = "dummy"
    sdk: ClassVar[str] = "dummy_sdk"
    source: ClassVar[str] = "the tests of whisperport"
    script: ClassVar[Path] = Path(stages.__file__)
    options: ClassVar[type[Any]] = DummyOptions
    suffix: ClassVar[str] = SUFFIX
    failures: ClassVar[Mapping[str, Explanation]] = {
        "RangeError": ("cannot represent a range", "use a lower `--option {target}.percentile=N`")
    }

    def __init__(self, chip: str) -> None:
        self.target = chip
        self.required = {"sdk": "dummy-sdk", "oldest": [2, 0]}

    def calibration(self, spec: ProgramSpec, dims: Dims, options: Any) -> CalibrationNeed:
        names = tuple(tensor.name for tensor in spec.inputs)
        fewer_hint = f"`--option {self.target}.samples=N` needs fewer samples"
        return CalibrationNeed(
            samples=options.samples,
            names=names,
            layout=flat,
            dtype="float16",
            fewer_hint=fewer_hint,
        )

    def emulation(self, spec: ProgramSpec, options: Any) -> EmulationNeed:
        return EmulationNeed(
            inputs=tuple(f"simulator_{tensor.name}" for tensor in spec.inputs),
            outputs=tuple(f"simulated_{tensor.name}" for tensor in spec.outputs),
            layout=flat,
            kind="simulated",
        )

    def plan(self, request: CompileRequest) -> CompilePlan:
        name, spec = request.spec.name, request.spec
        recipe = {"percentile": request.options.percentile}
        write_atomic(request.folder / "recipe.json", json.dumps(recipe).encode("utf-8"))
        inputs, simulated = self.emulated(request)
        stages = [
            Stage("quantize", ("recipe.json", *request.arrays), ("ranges.json",)),
            Stage("assemble", (f"{name}.onnx", "ranges.json"), (name + SUFFIX,)),
        ]
        if simulated:  # empty if the bundle's reference has no clips
            reads = (name + SUFFIX, *inputs.values())
            stages.append(Stage("simulate", reads, tuple(simulated.values())))
        return CompilePlan(
            stages=tuple(stages),
            artifact=name + SUFFIX,
            settings={
                "arrays": list(request.arrays),
                "simulator_inputs": list(inputs.values()),
                "simulator_outputs": list(simulated.values()),
                "shapes": {
                    "inputs": [tensor.shape for tensor in spec.inputs],
                    "outputs": [tensor.shape for tensor in spec.outputs],
                },
            },
            keep=("ranges.json",),
        )

    def check(self, artifact: Path, spec: ProgramSpec) -> Mapping[str, Any]:
        return {"compiler": check_artifact(artifact, self.target, spec).compiler}

    def accuracy(self, stage: str, log: str) -> Mapping[str, float]:
        return {name: float(db) for name, db in re.findall(r"(\S+): ([0-9.]+) dB", log)}
