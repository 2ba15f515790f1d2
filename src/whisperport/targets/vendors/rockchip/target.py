"""The targets: write ONNX for the compiler; run or emulate programs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast, final

from whisperport.program.bundle import ProgramEntry
from whisperport.program.runner import Runner
from whisperport.program.spec import ProgramSpec
from whisperport.targets.base import Unsupported
from whisperport.targets.onnx.target import OnnxTarget
from whisperport.targets.target_options import EmulationOptions, Option
from whisperport.targets.vendors.rockchip.chips import CHIPS, OPSET, TOOL, W8A16, Chip, spec_of
from whisperport.targets.vendors.rockchip.compiler import RknnCompiler


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions(EmulationOptions):
    """Options for running: on the chip, or emulated on the CPU."""

    cores: Annotated[
        Literal["auto", "0", "1", "2", "0-1", "0-2"],
        Option(
            "Cores of the NPU that run each program; auto lets the driver choose a core for each run. "
            "RK3588 has cores 0 to 2, RK3576 has 0 and 1"
        ),
    ] = "auto"


@final
class Rockchip(OnnxTarget):
    """The target for one chip. Lowered ONNX files can be emulated on the CPU before compilation."""

    run_options: ClassVar[type[Any]] = DeviceOptions

    def __init__(self, chip: Chip) -> None:
        self.chip, self.spec = chip, spec_of(chip)
        self.compiler = RknnCompiler(chip)

    def unsupported(self, program: str, precision: str) -> Unsupported | None:
        if precision != W8A16:
            return None
        return Unsupported(
            f"{TOOL} {self.chip.w8a16}",
            f"choose one of {', '.join(self.spec.runs.precisions)} with `--precision`",
        )

    def opset(self, spec: ProgramSpec) -> int:
        return OPSET

    def load_compiled(
        self, entries: Sequence[ProgramEntry], files: Mapping[str, Path], options: Any
    ) -> dict[str, Runner]:
        from whisperport.targets.vendors.rockchip.runtime import load_rknn_files

        cores = cast(DeviceOptions, options).cores
        return load_rknn_files(self.chip, [entry.spec for entry in entries], files, cores)


TARGETS = tuple(map(Rockchip, CHIPS))
