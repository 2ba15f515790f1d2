"""Lower programs to one ONNX file each: what the targets whose compilers read ONNX share."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.bundle import ProgramEntry
from whisperport.errors import LoweringError, MissingPackageError
from whisperport.placement import Placement
from whisperport.progress import Progress
from whisperport.targets.base import Target

if TYPE_CHECKING:  # boards have no torch
    from whisperport.programs.onnx_file import OnnxFacts
    from whisperport.programs.program import Program


def lower_to_onnx(
    target: Target, programs: Sequence["Program"], folder: Path, opset: int, progress: Progress
) -> list[ProgramEntry]:
    """Write each program, with its weights, as `TARGET/PROGRAM.onnx` in the root of a bundle.

    Raises:
        MissingPackageError: the ONNX exporter is not installed.
        LoweringError: the target rejects a program, or it cannot be written in this opset.
    """
    _check(target, programs)
    _writer(target.spec.name)  # before anything is written
    (folder / target.spec.name).mkdir(exist_ok=True)
    entries = []
    for program in programs:
        path = folder / target.spec.name / f"{program.name}.onnx"
        entry, _ = lower_file_to_onnx(target, program, path, opset, progress)
        files = tuple(f"{target.spec.name}/{file}" for file in entry.files)
        entries.append(replace(entry, files=files))
    return entries


def lower_file_to_onnx(
    target: Target,
    program: "Program",
    path: Path,
    opset: int,
    progress: Progress,
    *,
    simplify: bool = False,
) -> tuple[ProgramEntry, dict[str, Any]]:
    """Write one program, with its weights, to `path`.

    Returns:
        Its entry, with files relative to the folder of `path`; and the opset, the number of nodes, the
        highest rank and the bytes of weights of what was written.

    Raises:
        MissingPackageError: the ONNX exporter is not installed, or onnxslim is asked for and is not.
        LoweringError: it cannot be written in this opset.
    """
    name = target.spec.name
    write = _writer(name)
    progress(f"{program.name} to ONNX opset {opset} for {name}")
    facts = write(program, path, opset=opset, simplify=simplify)
    entry = ProgramEntry(
        spec=program.spec,
        placement=Placement(name),
        method=program.name,
        files=tuple(file.relative_to(path.parent).as_posix() for file in facts.files),
        delegation={
            "delegated": facts.nodes,
            "subgraphs": 1,
            "undelegated": [],
            "opset": facts.opset,
        },
    )
    return entry, {
        "opset": facts.opset,
        "nodes": facts.nodes,
        "max_rank": facts.max_rank,
        "weight_bytes": facts.weight_bytes,
    }


def _writer(target: str) -> "Callable[..., OnnxFacts]":
    try:
        from whisperport.programs.onnx_file import write_onnx_file
    except ImportError as error:
        raise MissingPackageError(
            f"cannot lower for `{target}`: the ONNX exporter is not installed",
            why=str(error),
            hint='pip install "whisperport[export]"',
        ) from error
    return write_onnx_file


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
