"""The targets for the dummy's chips."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

from whisperport.program.bundle import ProgramEntry
from whisperport.program.runner import Runner
from whisperport.program.spec import ProgramSpec, Support, TargetSpec
from whisperport.targets.onnx.target import OnnxTarget, onnx_lowering, onnx_runs, onnx_software
from whisperport.targets.target_options import EmulationOptions
from whisperport.targets.vendors.dummy.compiler import DummyCompiler
from whisperport.targets.vendors.dummy.importer import DummyImporter
from whisperport.targets.vendors.dummy.runner import DummyRunner

CHIPS = ("dummy1", "dummy2")


@final
class Dummy(OnnxTarget):
    """The target for one chip."""

    run_options: ClassVar[type[Any]] = EmulationOptions

    def __init__(self, chip: str) -> None:
        self.spec = TargetSpec(
            name=chip,
            summary="Accelerator that exists only in tests",
            supports=Support(max_rank=4, formats=frozenset({"torch", "onnx"})),
            lowering=onnx_lowering(),
            runs=onnx_runs(programs=frozenset({"encoder", "step"}), precisions=("w8a8",)),
            software=onnx_software(runtime="onnxruntime"),
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

    def opset(self, spec: ProgramSpec) -> int:
        return 17

    def load_compiled(
        self, entries: Sequence[ProgramEntry], files: Mapping[str, Path], options: Any
    ) -> dict[str, Runner]:
        specs = [entry.spec for entry in entries]
        return {spec.name: DummyRunner(spec, files[spec.name], self.spec.name) for spec in specs}


TARGETS = tuple(map(Dummy, CHIPS))
