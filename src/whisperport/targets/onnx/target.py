"""The base of targets whose vendor's compiler reads ONNX: they write it, and can emulate it on the CPU."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.bundle import ProgramEntry
from whisperport.bundle.onnx_graph import OnnxGraph
from whisperport.program.runner import Runner
from whisperport.program.spec import ProgramSpec, TargetSpec
from whisperport.system.progress import Progress
from whisperport.targets.base import RunOptions, Target
from whisperport.targets.compiler import Compiler
from whisperport.targets.onnx.lowering import lower_file_to_onnx
from whisperport.targets.onnx.runner import OnnxRunner
from whisperport.targets.program_files import compiled_files, lower_separately, lowered_file

if TYPE_CHECKING:  # boards have no torch
    from whisperport.trace.program import Program

LOWERED = ".onnx"


# The spec of a target whose vendor's compiler reads ONNX, and rejects a program with an unsupported node.
onnx_spec = partial(
    TargetSpec,
    formats=frozenset({"torch", "onnx"}),
    rejects_programs=True,
    lowered_suffix=LOWERED,
    lowered_max_rank=4,
    fallback="onnxruntime",
    emulation={"emulate": "on"},
    emulation_runtime="onnxruntime",
    extra="export",
)


class OnnxTarget(Target):
    """A target that writes each program to an ONNX file with its weights, for the vendor's compiler.

    Its run options have a field `emulate`: if it is "on", `load` runs the ONNX files on the CPU.
    """

    compiler: Compiler

    @abstractmethod
    def opset(self, spec: ProgramSpec) -> int:
        """Return the version of ONNX's operator set in which a program is written."""

    def texts(self, spec: ProgramSpec) -> Mapping[str, str]:
        """Return suffix -> text of each file that the compiler reads besides a program's ONNX file."""
        return {}

    @abstractmethod
    def load_compiled(
        self, specs: Sequence[ProgramSpec], files: Mapping[str, Path], options: Any
    ) -> dict[str, Runner]:
        """Load compiled files.

        Args:
            specs: signatures of the programs.
            files: name of the program -> its compiled file.
            options: an instance of `run_options`.

        Returns:
            Name of the program -> its runner.

        Raises:
            MissingPackageError: the runtime is not installed.
            BundleError: a file is damaged, or is for another chip or program.
        """

    def lower(
        self, programs: Sequence["Program"], folder: Path, progress: Progress
    ) -> list[ProgramEntry]:
        """Write each program in float32 to an ONNX file that contains its weights."""
        return lower_separately(self, programs, folder, progress)

    def lower_file(
        self, program: "Program", path: Path, progress: Progress, *, simplify: bool = False
    ) -> tuple[ProgramEntry, dict[str, Any]]:
        """Write one program in float32 to an ONNX file that contains its weights."""
        spec = program.spec
        entry, facts = lower_file_to_onnx(
            self, program, path, self.opset(spec), progress, simplify=simplify
        )
        texts = self.texts(spec)
        for suffix, text in texts.items():
            path.with_suffix(suffix).write_text(text, encoding="utf-8")
        files = (*entry.files, *(path.with_suffix(suffix).name for suffix in texts))
        return replace(entry, files=files), facts

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        chosen = options.of(self)
        if chosen.emulate == "on":
            return self._emulated(folder, entries, options.threads)
        files = compiled_files(self.spec, folder, entries, self.compiler.suffix)
        return self.load_compiled([entry.spec for entry in entries], files, chosen)

    def _emulated(
        self, folder: Path, entries: Sequence[ProgramEntry], threads: int | None
    ) -> dict[str, Runner]:
        """Return runners of the ONNX files on the CPU."""
        files = {one.spec.name: lowered_file(self.spec, one, LOWERED) for one in entries}
        return {
            one.spec.name: OnnxRunner(
                one.spec, OnnxGraph.of(folder, one, files[one.spec.name]), threads
            )
            for one in entries
        }
