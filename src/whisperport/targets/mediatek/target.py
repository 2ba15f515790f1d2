"""The MediaTek targets: write .tflite files for the compiler; run or emulate programs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

from whisperport.bundle import ProgramEntry, regular_file
from whisperport.errors import BundleError, LoweringError
from whisperport.placement import Placement
from whisperport.progress import Progress
from whisperport.runner import Runner
from whisperport.spec import Rejection
from whisperport.targets.base import RunOptions, Target, Unsupported
from whisperport.targets.mediatek import options as own_options
from whisperport.targets.mediatek.chips import Chip
from whisperport.targets.mediatek.compiler import NccCompiler
from whisperport.targets.mediatek.neuron_provider import NEURON
from whisperport.targets.mediatek.partitioner import LiteRtPartitioner
from whisperport.targets.mediatek.specs import spec_of
from whisperport.targets.mediatek.unsupported import unsupported

if TYPE_CHECKING:  # boards have no torch
    from whisperport.programs.program import Program

COMPILED, LOWERED = ".dla", ".tflite"


@final
class Genio(Target):
    """The target for one board. Lowered .tflite files can be emulated on the CPU before compilation."""

    run_options: ClassVar[type[Any]] = own_options.RunOptions
    execution_provider = NEURON

    def __init__(self, chip: Chip) -> None:
        self.chip, self.spec = chip, spec_of(chip)
        self.compiler = NccCompiler(chip)
        self.partitioner = LiteRtPartitioner(chip)

    def unsupported(self, program: str, precision: str) -> Unsupported | None:
        return unsupported(self.chip, program, precision)

    def check(self, program: "Program") -> list[Rejection]:
        from whisperport.targets.graph_check import rejections

        return rejections(program, self.spec)

    def lower(
        self, programs: Sequence["Program"], folder: Path, progress: Progress
    ) -> list[ProgramEntry]:
        """Write each program to a .tflite file of its own in float32, as MediaTek's compiler reads it."""
        from whisperport.targets.tflite_lowering import lower_to_tflite

        for program in programs:
            self._check_accepted(program)
        entries = []
        for program in programs:
            file = f"{self.spec.name}/{program.name}{LOWERED}"
            facts = lower_to_tflite(
                [program],
                folder / file,
                progress,
                target=self.spec.name,
                extra=self.spec.extra,
            )[program.name]
            self._check_written(folder / file, program.name)
            entries.append(
                ProgramEntry(
                    spec=program.spec,
                    placement=Placement(self.spec.name, self.spec.precisions[0]),
                    method=program.name,
                    files=(file,),
                    delegation={
                        "delegated": facts.nodes,
                        "undelegated": [],
                        "subgraphs": 1,
                        "operators": dict(facts.operators),
                    },
                )
            )
        return entries

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        chosen = cast(own_options.RunOptions, options.of(self))
        if chosen.emulation:
            from whisperport.targets.tflite_runner import TfliteFile, TfliteRunner

            return {
                entry.spec.name: TfliteRunner(
                    entry.spec,
                    TfliteFile(
                        regular_file(folder, self._file(entry, LOWERED)),
                        options.threads,
                        extra=self.spec.run_extra,
                    ),
                )
                for entry in entries
            }
        from whisperport.targets.mediatek.runtime import load_dlas

        files = {e.spec.name: regular_file(folder, self._file(e, COMPILED)) for e in entries}
        return load_dlas(self.chip, [entry.spec for entry in entries], files, chosen)

    def _check_accepted(self, program: "Program") -> None:
        """Check a program before it is lowered.

        Raises:
            LoweringError: the NPU does not support one of its nodes.
        """
        if rejected := self.check(program):
            raise self._not_supported(program.name, rejected)

    def _check_written(self, path: Path, program: str) -> None:
        """Check the operators of a lowered file, which the converter chose.

        Raises:
            LoweringError: the NPU does not support one of them; the file is deleted.
        """
        from whisperport.inspection.check import rejections
        from whisperport.inspection.read_tflite import read_tflite

        rejected = [found for graph in read_tflite(path) for found in rejections(graph, self.spec)]
        if rejected:
            path.unlink()
            raise self._not_supported(program, rejected)

    def _not_supported(self, program: str, rejected: Sequence[Rejection]) -> LoweringError:
        return LoweringError(
            f"`{self.spec.name}` does not support the program `{program}`",
            why=f"{rejected[0].node}: {rejected[0].reason} ({len(rejected)} rejected nodes)",
            hint=f"place it on the fallback target: `--placement {program}={self.spec.fallback}`",
        )

    def _file(self, entry: ProgramEntry, suffix: str) -> str:
        """Return the file of a program with this suffix.

        Raises:
            BundleError: the program has no such file.
        """
        for file in entry.files:
            if file.endswith(suffix):
                return file
        listed = ", ".join(entry.files)
        if suffix == COMPILED:
            raise BundleError(
                f"`{entry.spec.name}` is not compiled for `{self.spec.name}` yet",
                why=f"the bundle contains {listed} for MediaTek's compiler, and no {COMPILED} file",
                hint="compile it with `whisperport compile BUNDLE`, or emulate it on the CPU with "
                f"`--run-option {self.spec.name}.emulation=tflite`",
            )
        raise BundleError(
            f"cannot emulate `{entry.spec.name}` of `{self.spec.name}` on the CPU",
            why=f"the bundle contains {listed}, and no {LOWERED} file",
            hint=f"export it again with `whisperport export CHECKPOINT --target {self.spec.name} "
            "--out BUNDLE`",
        )
