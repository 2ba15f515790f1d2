"""The base of targets whose programs a vendor's compiler compiles, and the CPU can emulate before."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.bundle import ProgramEntry
from whisperport.program.runner import Runner
from whisperport.system.progress import Progress
from whisperport.targets.base import RunOptions, Target
from whisperport.targets.compiler import Compiler
from whisperport.targets.program_files import compiled_files, lowered_file
from whisperport.targets.supported import expect_supported

if TYPE_CHECKING:  # boards have no torch
    from whisperport.trace.program import Program


class CompiledTarget(Target):
    """A target whose `lower_file` writes one program into files of its own, and makes their folder.

    Its run options have a field `emulate`: if it is "on", `load` runs the lowered files on the CPU.
    """

    compiler: Compiler

    @abstractmethod
    def load_lowered(
        self, folder: Path, entry: ProgramEntry, file: str, threads: int | None
    ) -> Runner:
        """Return a runner of a lowered program on the CPU.

        Args:
            folder: of the bundle.
            file: the lowered file, relative to the bundle.
            threads: CPU threads; None: the runtime chooses.

        Raises:
            MissingPackageError: the emulation's runtime is not installed.
            BundleError: the file is damaged.
        """

    @abstractmethod
    def load_compiled(
        self, entries: Sequence[ProgramEntry], files: Mapping[str, Path], options: Any
    ) -> dict[str, Runner]:
        """Load compiled files.

        Args:
            entries: the programs.
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
        """Write each program in float32 to `TARGET/PROGRAM` with the target's suffix."""
        for program in programs:
            expect_supported(self.spec, program.name, self.check(program))
        own = folder / self.spec.name
        entries = []
        for program in programs:
            path = own / f"{program.name}{self.spec.lowered_suffix}"
            entry, _ = self.lower_file(program, path, progress)
            files = tuple(f"{own.name}/{file}" for file in entry.files)
            entries.append(replace(entry, files=files))
        return entries

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        chosen = options.of(self)
        if chosen.emulate == "on":
            lowered = [(entry, lowered_file(self.spec, entry)) for entry in entries]
            return {
                entry.spec.name: self.load_lowered(folder, entry, file, options.threads)
                for entry, file in lowered
            }
        files = compiled_files(self.spec, folder, entries, self.compiler.suffix)
        return self.load_compiled(entries, files, chosen)
