"""The targets: write ONNX for the compiler; run or emulate programs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast, final

from whisperport.program.bundle import ProgramEntry
from whisperport.program.runner import Runner
from whisperport.program.spec import ProgramSpec
from whisperport.targets.base import Unsupported
from whisperport.targets.onnx.target import OnnxTarget
from whisperport.targets.vendors.rockchip import options as own_options
from whisperport.targets.vendors.rockchip.chips import CHIPS, OPSET, TOOL, W8A16, Chip, spec_of
from whisperport.targets.vendors.rockchip.compiler import RknnCompiler


@final
class Rockchip(OnnxTarget):
    """The target for one chip. Lowered ONNX files can be emulated on the CPU before compilation."""

    run_options: ClassVar[type[Any]] = own_options.RunOptions

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

        cores = cast(own_options.RunOptions, options).cores
        return load_rknn_files(self.chip, [entry.spec for entry in entries], files, cores)


TARGETS = tuple(map(Rockchip, CHIPS))
