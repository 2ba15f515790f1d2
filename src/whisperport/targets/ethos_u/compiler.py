"""The compiler, Arm's backend of ExecuTorch with Vela: its stages, and the check of compiled files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, cast, final

from whisperport.errors import LoweringError, UsageError
from whisperport.program.dims import Dims
from whisperport.program.spec import ProgramSpec
from whisperport.targets.compiler import (
    CalibrationNeed,
    CompilePlan,
    Compiler,
    CompileRequest,
    Estimate,
    Explanation,
)
from whisperport.targets.ethos_u import stages
from whisperport.targets.ethos_u.chips import DRIVER_FLAGS, Npu
from whisperport.targets.ethos_u.estimate import read_estimate, summary, to_estimate
from whisperport.targets.ethos_u.options import CompileOptions
from whisperport.targets.ethos_u.pte import check_pte
from whisperport.toolchain import Stage

T = TypeVar("T")
LOWERED, COMPILED = ".pt2", ".pte"
QUANTIZED, GRAPH, TENSORS, ESTIMATE = "quantized.pt2", "graph.tosa", "tensors.json", "estimate.csv"
# The versions that were tried. A file of torch.export has the version of torch that wrote it.
VERSIONS = {"executorch": [1, 5], "ethos-u-vela": [5, 1], "tosa-tools": [2026, 5], "torch": [2, 13]}
SAMPLES = 32  # of calibration
CONVERSIONS = ("quantize_per_tensor", "dequantize_per_tensor")  # of inputs and outputs, on the CPU

# Class of a stage's error -> what happened, as words that follow the compiler's title; and what to do.
_FAILURES: Mapping[str, Explanation] = {
    "UnsupportedOperatorError": (
        "does not support the program",
        "place it on the CPU: export with `--placement {program}=onnxruntime`",
    ),
    "OtherGraphError": (
        "made another graph than was asked for",
        "place the program on the CPU: export with `--placement {program}=onnxruntime`",
    ),
    "CompilerExitError": (
        "failed",
        "another `--option {target}.memory-mode` may have room for the program",
    ),
}
_FAILED_STAGES: Mapping[str, Explanation] = {
    "emulate": (
        "could not run the quantized program in the TOSA reference model",
        "`--option {target}.emulate=0` compiles without emulation",
    )
}


@final
class EthosUCompiler(Compiler):
    """The compiler for one NPU."""

    toolchain: ClassVar[str] = "ethos-u"
    sdk: ClassVar[str] = "ethosu"
    source: ClassVar[str] = (
        "x86-64 Linux, in an environment of its own: pip install torch==2.13.0, then "
        '"executorch[ethos-u]==1.5.1"'
    )
    script: ClassVar[Path] = Path(stages.__file__)
    options: ClassVar[type[Any]] = CompileOptions
    suffix: ClassVar[str] = COMPILED
    runs: ClassVar[Literal["emulated"]] = "emulated"  # there is no simulator of the compiled file
    decides: ClassVar[bool] = True
    failures: ClassVar[Mapping[str, Explanation]] = _FAILURES
    failed_stages: ClassVar[Mapping[str, Explanation]] = _FAILED_STAGES

    def __init__(self, npu: Npu, precision: str = "") -> None:
        self._npu, self._precision = npu, precision or npu.precisions[0]
        self.target = npu.name
        self.title = "ExecuTorch 1.5 with Vela 5.1"

    def in_precision(self, precision: str) -> Self:
        return type(self)(self._npu, precision)

    def settings(self) -> Mapping[str, Any]:
        return {"npu": self._npu.name, "versions": VERSIONS}

    def calibration(self, spec: ProgramSpec, dims: Dims, options: Any) -> CalibrationNeed:
        self._hardware(options)  # raises before the audio is processed, which can take minutes
        return CalibrationNeed(
            samples=SAMPLES, names=tuple(f"calibration_{tensor.name}" for tensor in spec.inputs)
        )

    def plan(self, request: CompileRequest) -> CompilePlan:
        name, chosen = request.spec.name, cast(CompileOptions, request.options)
        model, artifact = f"{name}{LOWERED}", f"{name}{COMPILED}"
        settings: dict[str, Any] = {
            "model": model,
            "artifact": artifact,
            "precision": self._precision,
            "headroom": chosen.headroom,
            **self._hardware(chosen),
            "calibration": list(request.arrays),
            "inputs": [tensor.name for tensor in request.spec.inputs],
            "outputs": [tensor.name for tensor in request.spec.outputs],
        }
        planned = [
            Stage("quantize", (*request.files, *request.arrays), (QUANTIZED,)),
            Stage("compile", (QUANTIZED,), (artifact, GRAPH, TENSORS, ESTIMATE)),
        ]
        inputs, outputs = self.emulated(request)
        if outputs:
            reads = (GRAPH, TENSORS, *inputs.values())
            planned.append(Stage("emulate", reads, tuple(outputs.values())))
            settings |= {"emulated_inputs": inputs, "emulated_outputs": list(outputs.values())}
        return CompilePlan(
            stages=tuple(planned),
            artifact=artifact,
            settings=settings,
            keep=(GRAPH, TENSORS, ESTIMATE),
        )

    def _hardware(self, chosen: CompileOptions) -> dict[str, Any]:
        """Return the NPU, the memory system and the driver that the compiler compiles for.

        Raises:
            UsageError: the NPU has no such number of MAC units, memory system, memory mode or driver.
        """
        npu = self._npu
        return {
            "accelerator": npu.accelerator(self._one_of("macs", chosen.macs, npu.macs)),
            "system_config": self._one_of(
                "system-config", chosen.system_config, npu.system_configs
            ),
            "memory_mode": self._one_of("memory-mode", chosen.memory_mode, npu.memory_modes),
            "flags": list(DRIVER_FLAGS[self._one_of("driver", chosen.driver, npu.drivers)]),
        }

    def _one_of(self, option: str, value: T | None, allowed: tuple[T, ...]) -> T:
        """Return an option's value; the first allowed one if the user did not choose."""
        if value is None:
            return allowed[0]
        if value not in allowed:
            raise UsageError(
                f"the option `{self._npu.name}.{option}` cannot be `{value}`",
                hint=f"expected one of {', '.join(map(str, allowed))}",
            )
        return value

    def check(self, artifact: Path, spec: ProgramSpec) -> Mapping[str, Any]:
        found = check_pte(artifact, spec, self._npu.name)
        elsewhere = [one for one in found.undelegated if not _is_conversion(one)]
        if found.subgraphs != 1 or elsewhere:
            raise LoweringError(
                f"`{spec.name}` is not one subgraph for the NPU of `{self._npu.name}`",
                why=f"{artifact.name} has {found.subgraphs} subgraphs, and {len(elsewhere)} operators on "
                f"the CPU{': ' if elsewhere else ''}{', '.join(sorted(set(elsewhere))[:5])}",
                hint=f"place it on the CPU: export with `--placement {spec.name}=onnxruntime`",
            )
        estimate = read_estimate(artifact.with_name(ESTIMATE))
        return {
            "compiler": "executorch 1.5, ethos-u-vela 5.1",
            "compiled_for": found.accelerator,
            "subgraphs": found.subgraphs,
            "undelegated": list(found.undelegated),
            "plan": {"NPU subgraphs": found.subgraphs, "CPU conversions": len(found.undelegated)},
            "estimate": estimate,
            "notes": [summary(estimate)] if estimate else [],
        }

    def estimate(self, facts: Mapping[str, Any]) -> Estimate | None:
        try:
            return to_estimate(facts["estimate"])
        except (
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
        ):  # none, or someone else wrote the manifest
            return None


def _is_conversion(operator: str) -> bool:
    """Return whether an operator converts an input or output between float32 and the NPU's integers."""
    return any(name in operator for name in CONVERSIONS)
