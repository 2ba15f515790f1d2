"""Check a traced program's graph against the limits of a target's spec; needs torch and no SDK."""

from typing import TYPE_CHECKING

from whisperport.spec import Rejection, TargetSpec

if TYPE_CHECKING:  # boards have no torch
    from whisperport.programs.program import Program


def rejections(program: "Program", spec: TargetSpec) -> list[Rejection]:
    """List every node of `program` that `spec` rejects, with the value found and the limit."""
    from whisperport.inspection.check import rejections as rejections_of
    from whisperport.inspection.read_exported import read_exported

    return rejections_of(read_exported(program.name, program.exported), spec)
