"""The base of targets whose vendor's compiler reads ONNX: they write it, and can emulate it on the CPU."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.program.bundle import ProgramEntry
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.program.runner import Runner
from whisperport.program.spec import Lowering, ProgramSpec, Runs, Software, Support
from whisperport.targets.compiled_target import CompiledTarget
from whisperport.targets.onnx.lower_file import lower_file_to_onnx
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
