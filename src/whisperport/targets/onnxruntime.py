"""ONNX Runtime, on the CPU or any execution provider that is installed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self, final

from whisperport.bundle import ProgramEntry
from whisperport.bundle.onnx_graph import OnnxGraph
from whisperport.errors import MissingPackageError, UsageError
from whisperport.runner import Runner
from whisperport.spec import Refusal, TargetSpec
from whisperport.targets.base import RunOptions, Say, Target
from whisperport.targets.onnx_runner import CPU, OnnxRunner
from whisperport.targets.onnx_weights import OnnxWeights

if TYPE_CHECKING:  # boards have no torch
    from whisperport.programs.program import Program

FOLDER = "onnxruntime"
OPSETS = range(13, 21)  # that `programs/onnx_opset.py` writes; the last unless another is asked for


@final
class OnnxRuntime(Target):
    """Options for lowering: `opset`, 13 to 20 (20). For running: `provider`, the name of an execution
    provider (CPUExecutionProvider)."""

    spec = TargetSpec(
        name="onnxruntime",
        summary="ONNX Runtime: any CPU, and its other execution providers where installed",
        status="run here",
        dtypes=frozenset({"float32", "float16", "int64", "int32", "bool"}),
        formats=frozenset({"torch", "onnx"}),
        domains=frozenset({"com.microsoft"}),
        run_options=frozenset({"provider"}),
        lower_options=frozenset({"opset"}),
        trial_options={"provider": CPU},
        extra="export",
        sources={
            "formats": "it reads ONNX; torch programs are written as ONNX first",
            "domains": "onnxruntime docs/ContribOperators.md",
            "static": "it runs dynamic shapes; whisperport's runtime passes static ones",
            "dtypes": "onnx/onnx docs/Operators.md, opset 20: types of Add, MatMul, Gather, Where",
            "max_rank": "none found in ONNX Runtime's CPU kernels; 8 is what other compilers stop at",
        },
    )

    def __init__(self, opset: int = OPSETS[-1]) -> None:
        self.opset = opset

    def configured(self, options: Mapping[str, str]) -> Self:
        opset = options.get("opset", str(OPSETS[-1]))
        if opset not in map(str, OPSETS):
            raise UsageError(
                f"ONNX opset {opset[:20]!r} is not written",
                hint=f"opsets {OPSETS[0]} to {OPSETS[-1]} are",
            )
        return type(self)(int(opset))

    def check(self, program: "Program") -> list[Refusal]:
        from whisperport.targets.graph_check import refusals

        return refusals(program, self.spec)

    def lower(self, programs: Sequence["Program"], folder: Path, say: Say) -> list[ProgramEntry]:
        try:
            from whisperport.programs.onnx import SharedWeights, write_onnx
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
            say(f"{program.name} to ONNX opset {self.opset}")
            path = folder / FOLDER / f"{program.name}.onnx"
            nodes = write_onnx(program, path, weights, opset=self.opset)
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
                        "opset": self.opset,
                    },
                )
            )
        return entries

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        provider = options.options.get("provider", CPU)
        graphs = [OnnxGraph.of(folder, entry) for entry in entries]
        # Another provider copies weights to a memory of its own.
        weights = OnnxWeights(graphs if provider == CPU else [])
        return {
            entry.spec.name: OnnxRunner(
                entry.spec, graph, options.threads, provider, weights if graph in weights else None
            )
            for entry, graph in zip(entries, graphs, strict=True)
        }
