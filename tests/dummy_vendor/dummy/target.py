"""The dummy's chips as targets."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, final

from whisperport.bundle import ProgramEntry, regular_file
from whisperport.bundle.onnx_graph import OnnxGraph
from whisperport.errors import BundleError
from whisperport.runner import Array, Runner
from whisperport.spec import ProgramSpec, Refusal, TargetSpec
from whisperport.targets.base import RunOptions, Say, Target
from whisperport.targets.dummy.artifact import SUFFIX, check_artifact
from whisperport.targets.dummy.compiler import DummyCompiler
from whisperport.targets.dummy.importer import DummyImporter
from whisperport.targets.onnx_lowering import lower_to_onnx
from whisperport.targets.onnx_runner import OnnxRunner

if TYPE_CHECKING:  # boards have no torch
    from whisperport.programs.program import Program

CHIPS = ("dummy1", "dummy2")
OPSET = 17


@final
class Dummy(Target):
    """One chip. Run option: `emulation`, where `onnx` runs the lowered file on the CPU."""

    def __init__(self, chip: str) -> None:
        self.spec = TargetSpec(
            name=chip,
            summary="An accelerator that exists in tests only",
            status="checked against contract",
            max_rank=4,
            formats=frozenset({"torch", "onnx"}),
            programs=frozenset({"encoder", "step"}),
            rest="onnxruntime",
            run_options=frozenset({"emulation"}),
            stand_in={"emulation": "onnx"},
            extra="export",
            sources={
                "dtypes": "the dummy's data sheet, page 1",
                "max_rank": "the dummy's data sheet, page 2",
                "formats": "the dummy's data sheet, page 3",
                "domains": "the dummy's data sheet, page 3",
                "static": "the dummy's data sheet, page 4",
            },
        )
        self.compiler = DummyCompiler(chip)
        self.importer = DummyImporter(chip)

    def check(self, program: "Program") -> list[Refusal]:
        from whisperport.targets.graph_check import refusals

        return refusals(program, self.spec)

    def lower(self, programs: Sequence["Program"], folder: Path, say: Say) -> list[ProgramEntry]:
        return lower_to_onnx(self, programs, folder, OPSET, say)

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        emulated = options.options.get("emulation") == "onnx"
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
                why=f"the bundle holds {', '.join(entry.files)}",
                hint="whisperport compile BUNDLE; until then, `--run-option emulation=onnx`",
            )
        if emulated:
            return OnnxRunner(entry.spec, OnnxGraph.of(folder, entry, file), threads)
        return DummyRunner(entry.spec, regular_file(folder, file), self.spec.name)


class DummyRunner(Runner):
    """A compiled program on the device, which this one simulates."""

    def __init__(self, spec: ProgramSpec, path: Path, chip: str) -> None:
        super().__init__(spec)
        import onnxruntime

        program = check_artifact(path, chip, spec).program
        self._session = onnxruntime.InferenceSession(program)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        names = [tensor.name for tensor in self.spec.inputs]
        outputs: Sequence[Array] = self._session.run(
            [tensor.name for tensor in self.spec.outputs], dict(zip(names, inputs, strict=True))
        )
        return outputs
