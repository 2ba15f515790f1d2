"""The targets: write and quantize ONNX for the compiler; run, simulate or emulate programs."""

import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast, final

from whisperport.program.bundle import ProgramEntry
from whisperport.program.program_kind import STEP, kind_of
from whisperport.program.runner import Runner
from whisperport.program.spec import ProgramSpec
from whisperport.system.progress import begin_stage
from whisperport.targets.base import RunMode, RunOptions, Unsupported
from whisperport.targets.compiler import CalibrationNeed
from whisperport.targets.onnx.target import OnnxTarget
from whisperport.targets.vendors.qualcomm.chips import (
    CHIPS,
    FLOAT,
    OPSET,
    W8A16,
    Chip,
    published_times,
    spec_of,
)
from whisperport.targets.vendors.qualcomm.compiler import SIMULATORS, QnnCompiler
from whisperport.targets.vendors.qualcomm.runtime import DeviceOptions, load_contexts

SAMPLES = 32  # of calibration


@final
class Qualcomm(OnnxTarget):
    """The target for one chip. Lowered ONNX files can be emulated on the CPU before compilation."""

    run_options: ClassVar[type[Any]] = DeviceOptions

    def __init__(self, chip: Chip) -> None:
        self.chip, self.spec = chip, spec_of(chip)
        self.compiler = QnnCompiler(chip)
        self.published = published_times(chip.name)

    def unsupported(self, program: str, precision: str) -> Unsupported | None:
        architecture = self.chip.architecture
        if precision == W8A16 and _rows(program) < architecture.min_rows:
            return Unsupported(
                f"in the simulator of onnxruntime-qnn 2.7.0, a matrix multiplication of two activations "
                f"is wrong on the Hexagon NPU {architecture.name} if the first has 16 bits and fewer than "
                f"{architecture.min_rows} rows: the SQNR is below 4 dB, and 39 dB on v68",
                f"use `--precision {program}={FLOAT}` for this program",
            )
        if precision != FLOAT or FLOAT in architecture.precisions:
            return None
        return Unsupported(
            f"the Hexagon NPU {architecture.name} of {self.chip.name} has no floating point "
            f"(source: {architecture.source})",
            f"use `--precision {architecture.precisions[0]}`, the default of `{self.chip.name}`",
        )

    def run_mode(self, options: RunOptions) -> RunMode:
        mode = super().run_mode(options)
        return "simulator" if mode == "device" and platform.machine() in SIMULATORS else mode

    def emulated_precision(self, precision: str) -> str:
        """Return the precision of the lowered file: float32 if the NPU computes it in float16."""
        return "fp32" if precision == FLOAT else precision

    def opset(self, spec: ProgramSpec) -> int:
        return OPSET

    def calibration(self, spec: ProgramSpec, precision: str) -> CalibrationNeed | None:
        if precision != W8A16:
            return None
        return CalibrationNeed(samples=SAMPLES, names=tuple(tensor.name for tensor in spec.inputs))

    def quantize(
        self, entry: ProgramEntry, folder: Path, arrays: Mapping[str, Path]
    ) -> ProgramEntry:
        from whisperport.targets.vendors.qualcomm.quantization import quantize_in_place

        begin_stage(f"quantizing {entry.spec.name} to {entry.precision}")
        path = folder / self.lowered_file(entry)
        operand = self.chip.architecture.operand
        quantize_in_place(
            path, arrays, operand, target=self.spec.name, extra=self.spec.software.extra
        )
        return entry

    def load_compiled(
        self, entries: Sequence[ProgramEntry], files: Mapping[str, Path], options: Any
    ) -> dict[str, Runner]:
        return load_contexts(
            self.chip,
            [entry.spec for entry in entries],
            files,
            cast(DeviceOptions, options),
        )


def _rows(program: str) -> int:
    """Return for how many tokens a program computes attention; a large number if they are many."""
    kind = kind_of(program)
    return 1 if kind.name == STEP else kind.tokens or sys.maxsize


TARGETS = tuple(map(Qualcomm, CHIPS))
