"""Check programs against a target's limits: what it rejects, why, what it costs, and what to do."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.errors import MissingPackageError
from whisperport.progress import Progress
from whisperport.targets import get_target

if TYPE_CHECKING:  # boards have no torch
    from whisperport.inspection.check import CheckedProgram
    from whisperport.programs.program import Program


@dataclass(frozen=True, slots=True)
class Checked:
    """What a target makes of the programs of a file; true if it rejects nothing."""

    target: str
    programs: "tuple[CheckedProgram, ...]"

    def __bool__(self) -> bool:
        """What was only not seen in programs known to compile is no rejection."""
        return not any(program.rejected for program in self.programs)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "target": self.target,
            "passed": bool(self),
            "programs": [program.to_json() for program in self.programs],
        }


def check(
    program: "Program | str | os.PathLike[str]", target: str, *, progress: Progress = lambda _: None
) -> Checked:
    """Check a program against a target's limits; needs neither its compiler nor the program's weights.

    Args:
        program: a `.pt2`, `.onnx` or `.tflite` file, a bundle, or what
            `whisperport.programs.program.trace` returned.
        target: a name from `TARGETS`.
        progress: told what is being done, in a few words.

    Raises:
        UsageError: no such target.
        ProgramError: the program is missing, damaged, or of none of these formats.
        BundleError: it is a bundle, and damaged.
        MissingPackageError: the reader of its format is not installed.
    """
    spec = get_target(target).spec
    try:
        from whisperport.inspection.check import check_graph
        from whisperport.inspection.read import read_graphs
    except ImportError as error:
        raise MissingPackageError(
            "cannot check a program: the readers of its format are not installed",
            why=str(error),
            hint='pip install "whisperport[export]"',
        ) from error
    if isinstance(program, str | os.PathLike):
        progress(f"reading {Path(program).name}")
        graphs = read_graphs(Path(program))
    else:
        from whisperport.inspection.read_exported import read_exported

        graphs = [read_exported(program.name, program.exported)]
    return Checked(target, tuple(check_graph(graph, spec) for graph in graphs))
