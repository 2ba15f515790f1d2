"""ONNX Runtime, on the CPU or any execution provider that is installed."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, final

from whisperport.bundle import ProgramEntry
from whisperport.errors import MissingPackageError
from whisperport.runner import Runner
from whisperport.spec import Refusal, TargetSpec
from whisperport.targets.base import RunOptions, Say, Target
from whisperport.targets.onnx_runner import CPU, OnnxRunner

if TYPE_CHECKING:  # boards have no torch
    from whisperport.programs.program import Program

FOLDER = "onnxruntime"


@final
class OnnxRuntime(Target):
    """Options for running: `provider`, the name of an execution provider (CPUExecutionProvider)."""

    spec = TargetSpec(
        name="onnxruntime",
        summary="ONNX Runtime: any CPU, and its other execution providers where installed",
        status="run here",
        dtypes=frozenset({"float32", "float16", "int64", "int32", "bool"}),
        formats=frozenset({"torch", "onnx"}),
        domains=frozenset({"com.microsoft"}),
        run_options=frozenset({"provider"}),
        extra="export",
        sources={
            "formats": "it reads ONNX; torch programs are written as ONNX first",
            "domains": "onnxruntime docs/ContribOperators.md",
            "static": "it runs dynamic shapes; whisperport's runtime passes static ones",
            "dtypes": "onnx/onnx docs/Operators.md, opset 20: types of Add, MatMul, Gather, Where",
            "max_rank": "none found in ONNX Runtime's CPU kernels; 8 is what other compilers stop at",
        },
    )

    def check(self, program: "Program") -> list[Refusal]:
        from whisperport.targets.graph_check import refusals

        return refusals(program, self.spec)

    def lower(self, programs: Sequence["Program"], folder: Path, say: Say) -> list[ProgramEntry]:
        try:
            from whisperport.programs.onnx import OPSET, SharedWeights, write_onnx
        except ImportError as error:
            raise MissingPackageError(
                "cannot lower for `onnxruntime`: the ONNX exporter is not installed",
                why=str(error),
                hint='pip install "whisperport[export]"',
            ) from error
        (folder / FOLDER).mkdir()
        weights = SharedWeights(folder / FOLDER / "weights.bin")
        entries = []
        for program in programs:
            say(f"{program.name} to ONNX")
            path = folder / FOLDER / f"{program.name}.onnx"
            nodes = write_onnx(program, path, weights)
            entries.append(
                ProgramEntry(
                    spec=program.spec,
                    target=self.spec.name,
                    method=program.name,
                    files=(f"{FOLDER}/{path.name}", f"{FOLDER}/{weights.path.name}"),
                    status=self.spec.status,
                    delegation={
                        "delegated": nodes,
                        "subgraphs": 1,
                        "undelegated": [],
                        "opset": OPSET,
                    },
                )
            )
        return entries

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        provider = options.options.get("provider", CPU)
        return {
            entry.spec.name: OnnxRunner(
                entry.spec, folder / entry.files[0], options.threads, provider
            )
            for entry in entries
        }
