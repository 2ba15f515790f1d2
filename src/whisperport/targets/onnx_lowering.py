"""Lower programs to one ONNX file each: what the targets whose compilers read ONNX share."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.bundle import ProgramEntry
from whisperport.errors import LoweringError, MissingPackageError
from whisperport.placement import Placement
from whisperport.targets.base import Say, Target

if TYPE_CHECKING:  # boards have no torch
    from whisperport.programs.program import Program


def lower_to_onnx(
    target: Target, programs: Sequence["Program"], folder: Path, opset: int, say: Say
) -> list[ProgramEntry]:
    """Write each program, with its weights, as `TARGET/PROGRAM.onnx` in the root of a bundle.

    Raises:
        MissingPackageError: the ONNX exporter is not installed.
        LoweringError: the target rejects a program, or it cannot be written in this opset.
    """
    name = target.spec.name
    try:
        from whisperport.programs.onnx_file import write_onnx_file
    except ImportError as error:
        raise MissingPackageError(
            f"cannot lower for `{name}`: the ONNX exporter is not installed",
            why=str(error),
            hint='pip install "whisperport[export]"',
        ) from error
    _check(target, programs)
    (folder / name).mkdir()
    entries = []
    for program in programs:
        say(f"{program.name} to ONNX opset {opset} for {name}")
        facts = write_onnx_file(program, folder / name / f"{program.name}.onnx", opset=opset)
        entries.append(
            ProgramEntry(
                spec=program.spec,
                placement=Placement(name),
                method=program.name,
                files=tuple(file.relative_to(folder).as_posix() for file in facts.files),
                delegation={
                    "delegated": facts.nodes,
                    "subgraphs": 1,
                    "undelegated": [],
                    "opset": facts.opset,
                },
            )
        )
    return entries


def _check(target: Target, programs: Sequence["Program"]) -> None:
    for program in programs:
        refused = target.check(program)
        if refused:
            fallback = target.spec.fallback
            raise LoweringError(
                f"`{target.spec.name}` does not support the program `{program.name}`",
                why=f"{refused[0].node}: {refused[0].reason} ({len(refused)} refusals in all)",
                hint=f"leave it to `{fallback}`, the fallback target" if fallback else "",
            )
