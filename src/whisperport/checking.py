"""Check programs against a target's limits: which nodes the target rejects, why, and what to do."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.preflight import requires_torch
from whisperport.progress import Progress
from whisperport.targets import get_target

if TYPE_CHECKING:  # torch is not installed where bundles only run
    from whisperport.inspection.check import CheckedProgram
    from whisperport.programs.program import Program


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of `check`; true if the target rejects no node of any program.

    Attributes:
        target: name of the target.
        programs: the findings of every program of the file.
    """

    target: str
    programs: "tuple[CheckedProgram, ...]"

    def __bool__(self) -> bool:
        """Return True if no node is rejected. A node that is only `not seen` is not rejected."""
        return not any(program.rejected for program in self.programs)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "target": self.target,
            "passed": bool(self),
            "programs": [program.to_json() for program in self.programs],
        }


def check(
    program: "Program | str | os.PathLike[str]", target: str, *, progress: Progress = lambda _: None
) -> Checked:
    """Check a program against a target's limits. Neither the target's compiler nor the weights are needed.

    Args:
        program: a `.pt2`, `.onnx` or `.tflite` file, a bundle, or a `Program` from
            `whisperport.programs.program.trace`.
        target: name of a target, as `whisperport targets` lists them.
        progress: called with the name of each stage, a few words.

    Returns:
        The nodes that the target rejects, does not delegate or was not seen to compile, for every program.

    Raises:
        UsageError: there is no such target.
        ProgramError: the program is missing, damaged, or of another format.
        BundleError: the bundle is damaged.
        MissingPackageError: the reader of the program's format is not installed.
    """
    spec = get_target(target).spec
    with requires_torch("check a program"):
        from whisperport.inspection.check import check_graph
        from whisperport.inspection.read import read_graphs
    if isinstance(program, str | os.PathLike):
        progress(f"reading {Path(program).name}")
        graphs = read_graphs(Path(program))
    else:
        from whisperport.inspection.read_exported import read_exported

        graphs = [read_exported(program.name, program.exported)]
    return Checked(target, tuple(check_graph(graph, spec) for graph in graphs))
