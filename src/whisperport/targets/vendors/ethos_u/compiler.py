"""The compiler, Arm's backend of ExecuTorch with Vela: stages, estimate, and check of compiled files.

The estimate is that of Vela's model of the NPU, for a memory system that the user names. Nothing was run.
"""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast, final

from whisperport.errors import UsageError
from whisperport.program.dims import Dims
from whisperport.program.spec import ProgramSpec
from whisperport.targets.compiled_file import (
    expect_signature,
    not_compiled,
    other_chip,
    printable,
    printable_texts,
    read_bytes,
    read_report,
)
from whisperport.targets.compiler import (
    CalibrationNeed,
    CompilePlan,
    Compiler,
    CompileRequest,
    Estimate,
    Explanation,
)
from whisperport.targets.target_options import Option, check_ranges, clips_option
from whisperport.targets.toolchain import Stage
from whisperport.targets.vendors.ethos_u import stages
from whisperport.targets.vendors.ethos_u.chips import DRIVER_FLAGS, Npu

LARGEST = 2**16  # characters that are read
KIB = 1024

# Column of Vela 5.1 -> name in the manifest, and the factor to its unit.
_COLUMNS: Mapping[str, tuple[str, float]] = {
    "inference_time": ("estimated_s", 1),
    "cycles_total": ("cycles", 1),
    "core_clock": ("clock_hz", 1),
    "sram_memory_used": ("sram_bytes", KIB),
    "dram_memory_used": ("dram_bytes", KIB),
    "on_chip_flash_memory_used": ("on_chip_flash_bytes", KIB),
    "off_chip_flash_memory_used": ("off_chip_flash_bytes", KIB),
    "nn_macs": ("macs", 1),
}


def read_estimate(path: Path) -> dict[str, Any]:
    """Return the estimate in SI units and bytes; {} if the file is missing, damaged or another one."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            lines = file.read(LARGEST).splitlines()
        (row,) = csv.DictReader(lines)
        numbers = {name: _number(row[column], by) for column, (name, by) in _COLUMNS.items()}
        return {
            **numbers,
            "system_config": row["system_config"][:60],
            "memory_mode": row["memory_mode"][:60],
        }
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        return {}


def to_estimate(estimate: Mapping[str, Any]) -> Estimate:
    """Return an estimate that `read_estimate` returned in the form that all compilers share.

    Raises:
        KeyError, TypeError, ValueError: it is not such an estimate.
    """
    numbers = {name: _number(estimate[name], 1) for name, _ in _COLUMNS.values()}
    flash = numbers["on_chip_flash_bytes"] + numbers["off_chip_flash_bytes"]
    memory = {"SRAM": numbers["sram_bytes"], "DRAM": numbers["dram_bytes"], "flash": flash}
    clock = f"{numbers['clock_hz'] / 1e6:g} MHz"
    return Estimate(
        seconds=numbers["estimated_s"],
        cycles=numbers["cycles"],
        memory_bytes={name: size for name, size in memory.items() if size},
        conditions=f"{clock}, {estimate['system_config']:.60}, {estimate['memory_mode']:.60}",
    )


def summary(estimate: Mapping[str, Any]) -> str:
    """Return an estimate that `read_estimate` returned as a line for users."""
    memory = to_estimate(estimate).memory_bytes
    used = ", ".join(f"{size / 1e6:.4g} MB of {name}" for name, size in memory.items())
    return (
        f"Vela estimates {1e3 * estimate['estimated_s']:.4g} ms at {estimate['clock_hz'] / 1e6:g} MHz, "
        f"and {used or 'no memory'}, with {estimate['system_config']} and {estimate['memory_mode']}; "
        "nothing was measured"
    )


def _number(text: str | float, factor: float) -> float:
    value = float(text) * factor
    if not 0 <= value < math.inf:  # false for NaN
        raise ValueError(f"{str(text)[:20]} is not a finite number")
    return value


T = TypeVar("T")
LOWERED, COMPILED = ".pt2", ".pte"
QUANTIZED, BUILT, GRAPH, TENSORS, ESTIMATE = (
    "quantized.pt2",
    "built.json",
    "graph.tosa",
    "tensors.json",
    "estimate.csv",
)
# The versions that were tried. A file of torch.export has the version of torch that wrote it.
VERSIONS = {"executorch": [1, 5], "ethos-u-vela": [5, 1], "tosa-tools": [2026, 5], "torch": [2, 13]}
SAMPLES = 32  # of calibration
MAGIC, MAGIC_PLACE = b"ET", 4  # of a .pte; source: executorch/schema/extended_header.h

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """Options for compiling.

    Raises:
        UsageError: a number is out of its range.
    """

    macs: Annotated[
        int | None,
        Option(
            "Number of 8-bit multiply-accumulate units of your chip's NPU; the default is 256, for "
            "Ethos-U65 512",
            low=32,
            high=2048,
        ),
    ] = None
    system_config: Annotated[
        str | None,
        Option(
            "Clock, SRAM and outer memory of your chip, by its name in the compiler's file vela.ini; the "
            "default is on the target's page"
        ),
    ] = None
    memory_mode: Annotated[
        str | None,
        Option(
            "Where weights and tensors are stored, by its name in vela.ini: Dedicated_Sram_384KB is the "
            "outer memory with this much SRAM as a cache; the default is on the target's page"
        ),
    ] = None
    driver: Annotated[
        Literal["bare-metal", "linux"],
        Option(
            "What drives the NPU: bare-metal, a program without operating system on a Cortex-M processor; "
            "linux, Arm's driver on a Cortex-A processor, with Ethos-U85 only"
        ),
    ] = "bare-metal"
    headroom: Annotated[
        int,
        Option(
            "Factor between the range of a 16-bit tensor and its largest value in the calibration set; "
            "above 1, the NPU's tables of functions are coarser",
            low=1,
            high=64,
        ),
    ] = 1
    emulate: Annotated[
        int,
        clips_option("the TOSA reference model"),
    ] = 2

    def __post_init__(self) -> None:
        check_ranges(self)


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
            Stage("compile", (QUANTIZED,), (artifact, BUILT, GRAPH, TENSORS, ESTIMATE)),
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
        """Compare what the stage compile wrote about the file with the program; see `described` there.

        The stage rejects a program that is not one subgraph for the NPU.
        """
        if read_bytes(artifact, len(MAGIC) + MAGIC_PLACE)[MAGIC_PLACE:] != MAGIC:
            raise not_compiled(artifact, "it is not an ExecuTorch program")
        built = read_report(artifact.with_name(BUILT))
        accelerator = printable(built.get("accelerator", ""))
        if accelerator.rpartition("-")[0] != self._npu.name:
            raise other_chip(
                artifact, self.target, f"it was compiled for {accelerator or 'no NPU'}"
            )
        inputs, outputs = (printable_texts(built.get(side)) for side in ("inputs", "outputs"))
        expect_signature(
            artifact, spec, inputs, outputs, lambda tensor: f"{list(tensor.shape)} {tensor.dtype}"
        )
        undelegated = printable_texts(built.get("undelegated"))
        estimate = read_estimate(artifact.with_name(ESTIMATE))
        return {
            "compiler": "executorch 1.5, ethos-u-vela 5.1",
            "compiled_for": accelerator,
            "subgraphs": 1,
            "undelegated": undelegated,
            "plan": {"NPU subgraphs": 1, "CPU conversions": len(undelegated)},
            "estimate": estimate,
            "notes": [summary(estimate)] if estimate else [],
        }

    def estimate(self, facts: Mapping[str, Any]) -> Estimate | None:
        try:
            return to_estimate(facts["estimate"])
        except (LookupError, TypeError, ValueError, OverflowError):  # none, or a foreign manifest
            return None
