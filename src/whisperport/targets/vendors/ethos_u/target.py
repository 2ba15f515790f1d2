"""The targets: write programs for the compiler, and emulate them on the CPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast, final

from whisperport.errors import UsageError, needs
from whisperport.program.bundle import ProgramEntry, regular_file
from whisperport.program.bundle.program_entry import ProgramFacts
from whisperport.program.placement import Placement
from whisperport.program.runner import Runner
from whisperport.system.progress import begin_stage
from whisperport.targets.base import RunMode, RunOptions
from whisperport.targets.compiled_target import CompiledTarget
from whisperport.targets.target_options import Option
from whisperport.targets.vendors.ethos_u.chips import NPUS, Npu, spec_of
from whisperport.targets.vendors.ethos_u.compiler import COMPILED, LOWERED, EthosUCompiler
from whisperport.targets.vendors.ethos_u.runtime import TorchRunner, load_graphs, use_threads

if TYPE_CHECKING:  # boards have no torch
    from whisperport.model.trace.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Options for running."""

    emulate: Annotated[
        Literal["off", "on", "quantized"],
        Option(
            "on runs the lowered programs in emulation on the CPU, in float32; quantized runs the "
            "compiler's quantized graphs there in the TOSA reference model, which needs the compiler's "
            "environment; off runs the compiled files, which this machine cannot"
        ),
    ] = "off"


@final
class EthosU(CompiledTarget):
    """The target for one NPU. Lowered programs can be emulated on the CPU before compilation."""

    compiler: EthosUCompiler
    run_options: ClassVar[type[Any]] = DeviceOptions

    def __init__(self, npu: Npu) -> None:
        self.npu, self.spec = npu, spec_of(npu)
        self.compiler = EthosUCompiler(npu)

    def run_mode(self, options: RunOptions) -> RunMode:
        return "quantized" if self._runs_quantized(options) else super().run_mode(options)

    def _runs_quantized(self, options: RunOptions) -> bool:
        return cast(DeviceOptions, options.of(self)).emulate == "quantized"

    def lower(self, programs: Sequence["Program"], folder: Path) -> list[ProgramEntry]:
        """Write each program in float32 to a file of torch.export with its weights."""
        _import_torch(self.spec.name)  # before anything is written
        return super().lower(programs, folder)

    def lower_file(
        self, program: "Program", path: Path, *, simplify: bool = False
    ) -> tuple[ProgramEntry, dict[str, Any]]:
        """Write one program in float32 to a file of torch.export with its weights."""
        if simplify:
            return super().lower_file(program, path, simplify=True)
        _import_torch(self.spec.name)
        import torch

        begin_stage(f"writing {program.name} for {self.spec.name}")
        for node in program.exported.graph.nodes:
            node.meta.pop("stack_trace", None)  # it has the paths of source files on this machine
        path = path.with_suffix(LOWERED)
        path.parent.mkdir(exist_ok=True)
        torch.export.save(program.exported, path)
        entry = ProgramEntry(
            spec=program.spec,
            placement=Placement(self.spec.name),
            method=program.name,
            files=(path.name,),
            facts=ProgramFacts(delegated=0, undelegated=(), subgraphs=0),
        )
        return entry, entry.facts.to_json()

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        if self._runs_quantized(options):
            return load_graphs(self.compiler, folder, entries)
        return super().load(folder, entries, options)

    def load_lowered(
        self, folder: Path, entry: ProgramEntry, file: str, threads: int | None
    ) -> Runner:
        _import_torch(self.spec.name)
        use_threads(threads)
        return TorchRunner(entry.spec, regular_file(folder, file))

    def load_compiled(
        self, entries: Sequence[ProgramEntry], files: Mapping[str, Path], options: Any
    ) -> dict[str, Runner]:
        raise UsageError(
            f"the compiled programs of `{self.spec.name}` do not run on this machine",
            why="they run on a chip with the NPU, in an ExecuTorch runner that contains its delegate; "
            "ExecuTorch's Python package has no such delegate",
            hint="run the quantized graphs on the CPU with "
            f"`--run-option {self.spec.name}.emulate=quantized`, or the lowered programs in float32 with "
            f"`--run-option {self.spec.name}.emulate=on`; or copy the {COMPILED} files to the device; "
            "docs/how-to/ethos-u85.md describes it",
        )


def _import_torch(target: str) -> None:
    with needs(f"cannot use `{target}`: torch is not installed", extra="export"):
        import torch.export  # noqa: F401


TARGETS = tuple(map(EthosU, NPUS))
