"""The vendor's compiler, in the package onnxruntime-qnn: its stages, and the check of compiled files."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast, final

from whisperport.program.spec import ProgramSpec
from whisperport.targets.compiled_file import other_chip, printable, read_report
from whisperport.targets.compiler import (
    CompilePlan,
    Compiler,
    CompileRequest,
    EmulationNeed,
    Explanation,
)
from whisperport.targets.target_options import Option, check_ranges, clips_option
from whisperport.targets.toolchain import Stage
from whisperport.targets.vendors.qualcomm import stages
from whisperport.targets.vendors.qualcomm.chips import FLOAT, Chip
from whisperport.targets.vendors.qualcomm.context import PROVIDER, Context, check_context

LOWERED, COMPILED = ".onnx", ".qnn"
BUILT = "built.json"
OLDEST = (2, 7)  # of onnxruntime-qnn; no older version was tried
SIMULATORS = frozenset({"x86_64", "AMD64"})  # processors for which the library is a simulator

# Class of a stage's error -> what happened, as words that follow the compiler's title; and what to do.
_FAILURES: Mapping[str, Explanation] = {
    "UnsupportedOperatorError": (
        "does not support the program",
        "place it on the CPU: export with `--placement {program}=onnxruntime`; the log of the stage names "
        "all nodes",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """Options for compiling.

    Raises:
        UsageError: a number is out of its range.
    """

    emulate: Annotated[
        int,
        clips_option(
            "the vendor's simulator",
            ". The encoder takes a minute per clip for a model of width 128 in fp16, and much longer for "
            "larger ones",
        ),
    ] = 2  # `prefill_64` runs in the second window
    optimization: Annotated[
        Literal[1, 2, 3],
        Option(
            "Effort of the compiler's optimization (htp_graph_finalization_optimization_mode): 1 is the "
            "fastest to compile, 3 gives the fastest program"
        ),
    ] = 3

    def __post_init__(self) -> None:
        check_ranges(self)


@final
class QnnCompiler(Compiler):
    """The compiler for one chip."""

    toolchain: ClassVar[str] = "qualcomm"
    sdk: ClassVar[str] = "onnxruntime_qnn"
    source: ClassVar[str] = 'x86-64 Linux: pip install "whisperport[qualcomm]"'
    script: ClassVar[Path] = Path(stages.__file__)
    options: ClassVar[type[Any]] = CompileOptions
    suffix: ClassVar[str] = COMPILED
    runs: ClassVar[Literal["simulated"]] = "simulated"
    failures: ClassVar[Mapping[str, Explanation]] = _FAILURES

    def __init__(self, chip: Chip) -> None:
        self.required = {"sdk": "onnxruntime-qnn", "oldest": list(OLDEST)}
        self._chip, self.target = chip, chip.name
        self.title = f"onnxruntime-qnn {OLDEST[0]}.{OLDEST[1]} (QAIRT)"

    def emulation(self, spec: ProgramSpec, options: Any) -> EmulationNeed | None:
        here = platform.machine() in SIMULATORS
        return super().emulation(spec, options) if here else None

    def plan(self, request: CompileRequest) -> CompilePlan:
        name, chosen = request.spec.name, cast(CompileOptions, request.options)
        model, artifact = f"{name}{LOWERED}", f"{name}{COMPILED}"
        inputs, outputs = self.emulated(request)
        settings: dict[str, Any] = {
            "model": model,
            "artifact": artifact,
            "options": provider_options(self._chip, chosen),
            "simulated_inputs": inputs,
            "simulated_outputs": outputs,
        }
        planned = [Stage("compile", request.files, (artifact, BUILT))]
        if outputs:
            reads = (artifact, *inputs.values())
            planned.append(Stage("simulate", reads, tuple(outputs.values())))
        return CompilePlan(stages=tuple(planned), artifact=artifact, settings=settings)

    def check(self, artifact: Path, spec: ProgramSpec) -> Mapping[str, Any]:
        context = check_context(artifact, spec)
        check_chip(context, self._chip, artifact)
        facts: dict[str, Any] = {
            "compiler": context.compiler,
            "compiled_for": f"{self._chip.name}, HTP {self._chip.architecture.name}",
            "context_bytes": context.context_bytes,
            "notes": [],
        }
        nodes = _nodes(artifact.with_name(BUILT))
        if nodes:
            facts["plan"] = {"HTP" if name == PROVIDER else name: n for name, n in nodes.items()}
            elsewhere = sum(count for name, count in nodes.items() if name != PROVIDER)
            if elsewhere:
                facts["notes"].append(f"{elsewhere} nodes run on the CPU")
        return facts


def provider_options(chip: Chip, chosen: CompileOptions) -> dict[str, str]:
    """Return the options of the execution provider with which a program is compiled for a chip.

    Source of the names: onnxruntime.ai, QNN Execution Provider, Configuration Options.
    """
    return {
        "soc_model": str(chip.soc_model),
        "htp_arch": str(chip.architecture.number),
        "vtcm_mb": str(chip.vtcm_mib),
        "enable_htp_fp16_precision": "1" if FLOAT in chip.architecture.precisions else "0",
        "htp_graph_finalization_optimization_mode": str(chosen.optimization),
    }


def check_chip(context: Context, chip: Chip, path: Path) -> None:
    """Check that a file was compiled for a chip, as far as the file states it.

    Raises:
        BundleError: it was compiled for another chip.
    """
    if context.soc_model is None:
        return
    if (context.soc_model, context.architecture) != (chip.soc_model, chip.architecture.number):
        raise other_chip(
            path,
            chip.name,
            f"it was compiled for chip {context.soc_model} with HTP v{context.architecture}; "
            f"`{chip.name}` is chip {chip.soc_model} with HTP {chip.architecture.name}",
        )


def _nodes(path: Path) -> dict[str, int]:
    """Return execution provider -> number of nodes, as the stage compile wrote it; {} if unknown."""
    nodes = read_report(path).get("nodes")
    if not isinstance(nodes, dict):
        return {}
    return {printable(name): count for name, count in nodes.items() if isinstance(count, int)}
