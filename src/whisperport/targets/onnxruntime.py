"""The target `onnxruntime`: ONNX Runtime on the CPU or another installed execution provider."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, cast, final

from whisperport.bundle import ProgramEntry
from whisperport.bundle.onnx_graph import OnnxGraph
from whisperport.errors import MissingPackageError
from whisperport.placement import Placement
from whisperport.progress import Progress
from whisperport.runner import Runner
from whisperport.spec import LoweringCost, Rejection, TargetSpec
from whisperport.targets.base import RunOptions, Target
from whisperport.targets.onnx_lowering import lower_file_to_onnx
from whisperport.targets.onnx_runner import CPU, OnnxRunner
from whisperport.targets.onnx_weights import OnnxWeights
from whisperport.targets.options import Option, check_ranges

if TYPE_CHECKING:  # boards have no torch
    from whisperport.programs.program import Program

FOLDER = "onnxruntime"
OPSETS = range(13, 21)  # those that `programs/onnx_opset.py` writes; the last is the default


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerOptions:
    """Options for lowering.

    Raises:
        UsageError: the opset is out of its range.
    """

    opset: Annotated[
        int, Option("Version of the ONNX operator set (opset)", low=OPSETS[0], high=OPSETS[-1])
    ] = OPSETS[-1]

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderOptions:
    """Options for running."""

    provider: Annotated[
        str, Option("Name of the ONNX Runtime execution provider that runs the programs")
    ] = CPU


@final
class OnnxRuntime(Target):
    """Writes one ONNX file per program and one file of weights for all programs; runs them."""

    lower_options: ClassVar[type[Any]] = LowerOptions
    run_options: ClassVar[type[Any]] = ProviderOptions
    spec = TargetSpec(
        name="onnxruntime",
        summary="ONNX Runtime on any CPU, or on another installed execution provider",
        dtypes=frozenset({"float32", "float16", "int64", "int32", "bool"}),
        formats=frozenset({"torch", "onnx"}),
        domains=frozenset({"com.microsoft"}),
        trial_options={"provider": CPU},
        runtime="onnxruntime",
        lowered_suffix=".onnx",
        lowered_max_rank=4,  # the file may be used by other compilers; most support no higher rank
        cost=LoweringCost(
            base_bytes=0.8e9, bundle_factor=1.85, program_factor=2.5, base_s=15, s_per_gb=128
        ),
        extra="export",
        sources={
            "formats": "ONNX Runtime reads ONNX; torch programs are converted to ONNX first",
            "domains": "onnxruntime docs/ContribOperators.md",
            "static": "ONNX Runtime supports dynamic shapes; whisperport uses static shapes only",
            "dtypes": "onnx/onnx docs/Operators.md, opset 20: types of Add, MatMul, Gather, Where",
            "max_rank": "no limit found in ONNX Runtime's CPU kernels; 8 is the limit of other compilers",
        },
    )

    def __init__(self, opset: int = OPSETS[-1]) -> None:
        self.opset = opset

    def configured(self, options: Any) -> Self:
        return type(self)(cast(LowerOptions, options).opset)

    def check(self, program: "Program") -> list[Rejection]:
        from whisperport.targets.graph_check import rejections

        return rejections(program, self.spec)

    def lower(
        self, programs: Sequence["Program"], folder: Path, progress: Progress
    ) -> list[ProgramEntry]:
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
            progress(f"writing {program.name} as ONNX opset {self.opset}")
            path = folder / FOLDER / f"{program.name}.onnx"
            nodes = write_onnx(program, path, weights, opset=self.opset)
            entries.append(
                ProgramEntry(
                    spec=program.spec,
                    placement=Placement(self.spec.name),
                    method=program.name,
                    files=(f"{FOLDER}/{path.name}", f"{FOLDER}/{weights.path.name}"),
                    delegation={
                        "delegated": nodes,
                        "subgraphs": 1,
                        "undelegated": [],
                        "opset": self.opset,
                    },
                )
            )
        return entries

    def lower_file(
        self, program: "Program", path: Path, progress: Progress, *, simplify: bool = False
    ) -> tuple[ProgramEntry, dict[str, Any]]:
        """Write one program to an ONNX file that contains its weights."""
        return lower_file_to_onnx(self, program, path, self.opset, progress, simplify=simplify)

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        provider = cast(ProviderOptions, options.of(self)).provider
        graphs = [OnnxGraph.of(folder, entry) for entry in entries]
        # Other providers copy weights to their own memory, so sharing does not help them.
        weights = OnnxWeights(graphs if provider == CPU else [])
        return {
            entry.spec.name: OnnxRunner(
                entry.spec, graph, options.threads, provider, weights if graph in weights else None
            )
            for entry, graph in zip(entries, graphs, strict=True)
        }
