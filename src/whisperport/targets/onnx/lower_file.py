"""Lower a program to one ONNX file; used by all targets whose compilers read ONNX."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.errors import needs
from whisperport.program.bundle import ProgramEntry
from whisperport.program.bundle.program_entry import ProgramFacts
from whisperport.program.placement import Placement
from whisperport.system.progress import begin_stage
from whisperport.targets.base import Target

if TYPE_CHECKING:  # boards have no torch
    from whisperport.model.trace.program import Program


def lower_file_to_onnx(
    target: Target,
    program: "Program",
    path: Path,
    opset: int,
    *,
    simplify: bool = False,
) -> tuple[ProgramEntry, dict[str, Any]]:
    """Write one program with its weights to `path`.

    Returns:
        The entry of the program, with paths relative to the folder of `path`; and facts about the file:
        opset, number of nodes, highest rank, and bytes of weights.

    Raises:
        MissingPackageError: the ONNX exporter is not installed, or `simplify` is set and onnxslim is not
            installed.
        LoweringError: the program cannot be written in this opset.
    """
    name = target.spec.name
    with needs(f"cannot lower for `{name}`: the ONNX exporter is not installed", extra="export"):
        from whisperport.model.trace.onnx_file import write_onnx_file
    path.parent.mkdir(exist_ok=True)  # not before: without an exporter, nothing is written
    begin_stage(f"writing {program.name} as ONNX opset {opset} for {name}")
    facts = write_onnx_file(program, path, opset=opset, simplify=simplify)
    entry = ProgramEntry(
        spec=program.spec,
        placement=Placement(name),
        method=program.name,
        files=tuple(file.relative_to(path.parent).as_posix() for file in facts.files),
        facts=ProgramFacts(
            delegated=facts.nodes, undelegated=(), subgraphs=1, target_facts={"opset": facts.opset}
        ),
    )
    return entry, {
        "opset": facts.opset,
        "nodes": facts.nodes,
        "max_rank": facts.max_rank,
        "weight_bytes": facts.weight_bytes,
    }
