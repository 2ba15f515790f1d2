"""The targets for the dummy's chips."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast, final

from whisperport.bundle import ProgramEntry, regular_file
from whisperport.bundle.onnx_graph import OnnxGraph
from whisperport.errors import BundleError
from whisperport.progress import Progress
from whisperport.runner import Runner
from whisperport.spec import Rejection, TargetSpec
from whisperport.targets.base import RunOptions, Target
from whisperport.targets.dummy.artifact import SUFFIX
from whisperport.targets.dummy.compiler import DummyCompiler
from whisperport.targets.dummy.importer import DummyImporter
from whisperport.targets.dummy.runner import DummyRunner
from whisperport.targets.onnx_lowering import lower_to_onnx
from whisperport.targets.onnx_runner import OnnxRunner
from whisperport.targets.options import Option

if TYPE_CHECKING:  # boards have no torch
    from whisperport.programs.program import Program

CHIPS = ("dummy1", "dummy2")
OPSET = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class DummyRunOptions:
    """Options for running."""

    emulation: Annotated[
        Literal["onnx"] | None,
        Option("Run the lowered ONNX files on the CPU; the default is the chip"),
    ] = None


@final
class Dummy(Target):
    """The target for one chip."""

    run_options: ClassVar[type[Any]] = DummyRunOptions

    def __init__(self, chip: str) -> None:
        self.spec = TargetSpec(
            name=chip,
            summary="Accelerator that exists only in tests",
            max_rank=4,
            formats=frozenset({"torch", "onnx"}),
            programs=frozenset({"encoder", "step"}),
            fallback="onnxruntime",
            precisions=("w8a8",),
            runtime="onnxruntime",
            emulation={"emulation": "onnx"},
            emulation_runtime="onnxruntime",
            extra="export",
            sources={
                "dtypes": "the dummy's data sheet, page 1",
                "max_rank": "the dummy's data sheet, page 2",
                "formats": "the dummy's data sheet, page 3",
                "domains": "the dummy's data sheet, page 3",
                "static": "the dummy's data sheet, page 4",
                "precisions": "the dummy's data sheet, page 5",
            },
        )
        self.compiler = DummyCompiler(chip)
        self.importer = DummyImporter(chip)

    def check(self, program: "Program") -> list[Rejection]:
        from whisperport.targets.graph_check import rejections

        return rejections(program, self.spec)

    def lower(
        self, programs: Sequence["Program"], folder: Path, progress: Progress
    ) -> list[ProgramEntry]:
        return lower_to_onnx(self, programs, folder, OPSET, progress)

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        emulated = cast(DummyRunOptions, options.of(self)).emulation == "onnx"
        return {
            entry.spec.name: self._runner(folder, entry, options.threads, emulated=emulated)
            for entry in entries
        }

    def _runner(
        self, folder: Path, entry: ProgramEntry, threads: int | None, *, emulated: bool
    ) -> Runner:
        suffix = ".onnx" if emulated else SUFFIX
        file = next((file for file in entry.files if file.endswith(suffix)), None)
        if file is None:
            raise BundleError(
                f"`{entry.spec.name}` is not compiled for `{self.spec.name}` yet",
                why=f"the bundle contains {', '.join(entry.files)}, and no {suffix} file",
                hint="compile it with `whisperport compile BUNDLE`, or emulate it with `--run-option "
                f"{self.spec.name}.emulation=onnx`",
            )
        if emulated:
            return OnnxRunner(entry.spec, OnnxGraph.of(folder, entry, file), threads)
        return DummyRunner(entry.spec, regular_file(folder, file), self.spec.name)
