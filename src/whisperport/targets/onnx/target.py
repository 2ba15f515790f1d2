"""Lower programs to ONNX files: a function, and the base of targets whose vendor's compiler reads ONNX.

Such a target writes the files, and can emulate itself on the CPU.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.errors import needs
from whisperport.program.bundle import ProgramEntry
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.program.bundle.program_entry import ProgramFacts
from whisperport.program.placement import Placement
from whisperport.program.runner import Runner
from whisperport.program.spec import Lowering, ProgramSpec, Runs, Software, Support
from whisperport.system.progress import begin_stage
from whisperport.targets.base import Target
from whisperport.targets.compiled_target import CompiledTarget
from whisperport.targets.onnx.runner import OnnxRunner

if TYPE_CHECKING:  # boards have no torch
    from whisperport.model.trace.program import Program

LOWERED = ".onnx"


# The parts of the spec of a target whose vendor's compiler reads ONNX, and rejects a program with an
# unsupported node.
onnx_support = partial(Support, formats=frozenset({"torch", "onnx"}), rejects_programs=True)
onnx_lowering = partial(Lowering, lowered_suffix=LOWERED, lowered_max_rank=4)
onnx_runs = partial(Runs, fallback="onnxruntime", emulation={"emulate": "on"})
onnx_software = partial(Software, emulation_runtime="onnxruntime", extra="export")


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


class OnnxTarget(CompiledTarget):
    """A target that writes each program to an ONNX file with its weights, for the vendor's compiler."""

    @abstractmethod
    def opset(self, spec: ProgramSpec) -> int:
        """Return the version of ONNX's operator set in which a program is written."""

    def texts(self, spec: ProgramSpec) -> Mapping[str, str]:
        """Return suffix -> text of each file that the compiler reads besides a program's ONNX file."""
        return {}

    def lower_file(
        self, program: "Program", path: Path, *, simplify: bool = False
    ) -> tuple[ProgramEntry, dict[str, Any]]:
        """Write one program in float32 to an ONNX file that contains its weights."""
        spec = program.spec
        entry, facts = lower_file_to_onnx(self, program, path, self.opset(spec), simplify=simplify)
        texts = self.texts(spec)
        for suffix, text in texts.items():
            path.with_suffix(suffix).write_text(text, encoding="utf-8")
        files = (*entry.files, *(path.with_suffix(suffix).name for suffix in texts))
        return replace(entry, files=files), facts

    def load_lowered(
        self, folder: Path, entry: ProgramEntry, file: str, threads: int | None
    ) -> Runner:
        return OnnxRunner(entry.spec, OnnxGraph.of(folder, entry, file), threads)
