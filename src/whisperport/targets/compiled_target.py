"""The base of targets whose programs a vendor's compiler compiles, and the CPU can emulate before."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.errors import BundleError, LoweringError
from whisperport.program.bundle import ProgramEntry, regular_file
from whisperport.program.runner import Runner
from whisperport.program.spec import Rejection
from whisperport.targets.base import RunOptions, Target
from whisperport.targets.compiler import Compiler

if TYPE_CHECKING:  # boards have no torch
    from whisperport.model.trace.program import Program


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
            UsageError: the device does not have what an option asks for, or two options contradict each
                other.
            MissingPackageError: the runtime is not installed, or does not support this Python.
            BundleError: a file is damaged, is for another chip or program, or cannot be loaded.
            LoweringError: the machine does not have the device, or another process uses it.
        """

    def lower(self, programs: Sequence["Program"], folder: Path) -> list[ProgramEntry]:
        """Write each program in float32 to `TARGET/PROGRAM` with the target's suffix."""
        for program in programs:
            self.expect_supported(program.name, self.check(program))
        own = folder / self.spec.name
        entries = []
        for program in programs:
            path = own / f"{program.name}{self.spec.lowering.lowered_suffix}"
            entry, _ = self.lower_file(program, path)
            files = tuple(f"{own.name}/{file}" for file in entry.files)
            entries.append(replace(entry, files=files))
        return entries

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        chosen = options.of(self)
        if chosen.emulate == "on":
            lowered = [(entry, self.lowered_file(entry)) for entry in entries]
            return {
                entry.spec.name: self.load_lowered(folder, entry, file, options.cores)
                for entry, file in lowered
            }
        files = {
            entry.spec.name: regular_file(folder, self._compiled_file(entry)) for entry in entries
        }
        return self.load_compiled(entries, files, chosen)

    def expect_supported(self, program: str, rejected: Sequence[Rejection]) -> None:
        """Raise LoweringError if the target's check rejects something in a program.

        Args:
            program: name of the program.
            rejected: what it rejects.
        """
        if rejected:
            raise LoweringError(
                f"`{self.spec.name}` does not support the program `{program}`",
                why=f"{rejected[0].node}: {rejected[0].reason} ({len(rejected)} rejected nodes)",
                hint=f"place it on the fallback target: `--placement {program}={self.spec.runs.fallback}`",
            )

    def lowered_file(self, entry: ProgramEntry) -> str:
        """Return the file of a program that the CPU can emulate, relative to the bundle.

        Raises:
            BundleError: the bundle contains no such file.
        """
        name, suffix = self.spec.name, self.spec.lowering.lowered_suffix
        return _with_suffix(
            entry,
            suffix,
            f"cannot emulate `{entry.spec.name}` of `{name}` on the CPU",
            f", and no {suffix} file",
            f"export it again with `whisperport export CHECKPOINT --target {name} --out BUNDLE`",
        )

    def _compiled_file(self, entry: ProgramEntry) -> str:
        name, suffix = self.spec.name, self.compiler.suffix
        return _with_suffix(
            entry,
            suffix,
            f"`{entry.spec.name}` is not compiled for `{name}` yet",
            f" for the vendor's compiler, and no {suffix} file",
            "compile it with `whisperport compile BUNDLE`, or emulate it on the CPU with "
            f"`--run-option {name}.emulate=on`",
        )


def _with_suffix(entry: ProgramEntry, suffix: str, what: str, lacks: str, hint: str) -> str:
    """Return the file of a program that ends in `suffix`."""
    matching = next((file for file in entry.files if file.endswith(suffix)), None)
    if matching is None:
        why = f"the bundle contains {', '.join(entry.files)}{lacks}"
        raise BundleError(what, why=why, hint=hint)
    return matching
