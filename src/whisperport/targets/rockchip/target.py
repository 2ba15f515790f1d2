"""The targets: write ONNX for the compiler; run or emulate programs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

from whisperport.bundle import ProgramEntry, regular_file
from whisperport.progress import Progress
from whisperport.runner import Runner
from whisperport.spec import Rejection
from whisperport.targets.base import RunOptions, Target, Unsupported
from whisperport.targets.onnx_lowering import lower_file_to_onnx, lower_to_onnx
from whisperport.targets.program_files import compiled_file, emulated_onnx
from whisperport.targets.rockchip import options as own_options
from whisperport.targets.rockchip.chips import TOOL, W8A16, Chip
from whisperport.targets.rockchip.compiler import COMPILED, RknnCompiler
from whisperport.targets.rockchip.specs import OPSET, spec_of

if TYPE_CHECKING:  # boards have no torch
    from whisperport.programs.program import Program


@final
class Rockchip(Target):
    """The target for one chip. Lowered ONNX files can be emulated on the CPU before compilation."""

    run_options: ClassVar[type[Any]] = own_options.RunOptions

    def __init__(self, chip: Chip) -> None:
        self.chip, self.spec = chip, spec_of(chip)
        self.compiler = RknnCompiler(chip)

    def unsupported(self, program: str, precision: str) -> Unsupported | None:
        if precision != W8A16:
            return None
        why = (
            f"{TOOL} ends with `munmap_chunk(): invalid pointer` when it compiles an encoder for it"
            if self.chip.name == "rk3562"
            else f"{TOOL} rejects it for this chip by name"
        )
        return Unsupported(
            why, f"choose one of {', '.join(self.spec.precisions)} with `--precision`"
        )

    def check(self, program: "Program") -> list[Rejection]:
        from whisperport.targets.graph_check import rejections

        return rejections(program, self.spec)

    def lower(
        self, programs: Sequence["Program"], folder: Path, progress: Progress
    ) -> list[ProgramEntry]:
        """Write each program in float32 to an ONNX file that contains its weights."""
        return lower_to_onnx(self, programs, folder, OPSET, progress)

    def lower_file(
        self, program: "Program", path: Path, progress: Progress, *, simplify: bool = False
    ) -> tuple[ProgramEntry, dict[str, Any]]:
        """Write one program in float32 to an ONNX file that contains its weights."""
        return lower_file_to_onnx(self, program, path, OPSET, progress, simplify=simplify)

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        chosen = cast(own_options.RunOptions, options.of(self))
        if chosen.emulation:
            return emulated_onnx(self.spec, folder, entries, options.threads)
        from whisperport.targets.rockchip.runtime import load_rknn_files

        files = {
            e.spec.name: regular_file(folder, compiled_file(self.spec, e, COMPILED))
            for e in entries
        }
        return load_rknn_files(self.chip, [entry.spec for entry in entries], files, chosen.cores)
