"""The target `litert`: what it supports, and its lowering, quantization and loading.

`xnnpack_delegation` asks LiteRT which nodes of a program XNNPACK runs. LiteRT lists the nodes of a file's
first subgraph only. To list another one, the two entries in the file's table of subgraphs are exchanged,
and exchanged again afterwards.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, final

from whisperport.program.bundle import ProgramEntry, regular_file
from whisperport.program.bundle.program_entry import ProgramFacts
from whisperport.program.placement import Placement
from whisperport.program.program_kind import ENCODER
from whisperport.program.runner import Runner
from whisperport.program.spec import (
    Limit,
    Lowering,
    LoweringCost,
    Package,
    ProgramSpec,
    Runs,
    Software,
    Support,
    TargetSpec,
)
from whisperport.system.progress import begin_stage
from whisperport.targets.base import RunOptions, Target
from whisperport.targets.compiler import CalibrationNeed
from whisperport.targets.quantizing import Sensitive, static_calibration
from whisperport.targets.target_options import Option
from whisperport.targets.tflite.quantization import (
    LINEAR,
    OPERATORS,
    PRECISIONS,
    STATIC_BITS,
    recipe,
)
from whisperport.targets.tflite.quantize_in_place import quantize_in_place, quantize_statically
from whisperport.targets.tflite.runner import TfliteFile, TfliteRunner

if TYPE_CHECKING:
    from whisperport.model.trace.program import Program


SOURCE = "google-ai-edge/LiteRT@038d2a2 tflite/delegates/xnnpack/xnnpack_delegate.cc, "
TFLITE = frozenset({"tflite"})
# By the names of `whisperport check`; capital letters are names of TFLite's schema.
XNNPACK_OPERATORS = frozenset(
    [
        *(
            "abs",
            "add",
            "amax",
            "cat",
            "ceil",
            "constant_pad_nd",
            "conv",
            "cos",
            "div",
            "elu",
            "exp",
        ),
        *(
            "floor",
            "gelu",
            "linear",
            "log",
            "matmul",
            "maximum",
            "mean",
            "minimum",
            "mul",
            "neg",
            "relu",
        ),
        *("reshape", "rsqrt", "sigmoid", "sin", "slice", "softmax", "split", "sqrt", "square"),
        *("squared_difference", "sub", "sum", "tanh", "transpose", "unsqueeze"),
        *(
            "ASSIGN_VARIABLE",
            "AVERAGE_POOL_2D",
            "DEPTHWISE_CONV_2D",
            "DEPTH_TO_SPACE",
            "DEQUANTIZE",
        ),
        *("HARD_SWISH", "LEAKY_RELU", "MAX_POOL_2D", "PRELU", "QUANTIZE", "READ_VARIABLE"),
        *("REDUCE_MIN", "RELU6", "RELU_N1_TO_1", "RESIZE_BILINEAR", "ROUND", "SPACE_TO_DEPTH"),
        *("TRANSPOSE_CONV", "VAR_HANDLE"),
    ]
)
LIMITS = (
    Limit(rule="WP101", value=XNNPACK_OPERATORS, formats=TFLITE, source=SOURCE + "VisitNode"),
    Limit(
        rule="WP212",
        value=frozenset({"float32", "float16", "int8", "uint8"}),
        formats=TFLITE,
        source=SOURCE + "CheckTensorFloat32OrQUInt8Type",
    ),
    Limit(
        rule="WP301",
        operators=frozenset({"linear"}),
        formats=TFLITE,
        source="LiteRT 2.3.0 lists FULLY_CONNECTED with a computed weight outside of XNNPACK",
    ),
    Limit(
        rule="WP305",
        operators=frozenset({"slice"}),
        value=("step", frozenset({"1"})),
        formats=TFLITE,
        source="LiteRT 2.3.0 lists STRIDED_SLICE with steps of 2 outside of XNNPACK",
    ),
    Limit(
        rule="WP311",
        operators=frozenset({"cat"}),
        value=5,
        formats=TFLITE,
        source="LiteRT 2.3.0 lists CONCATENATION of 6 tensors outside of XNNPACK, and not of 5",
    ),
)


FOLDER = "litert"
EXTRA, RUN_EXTRA = "litert-export", "litert"
# Operator that one fixed scale may ruin -> its precision then. Attention has no weights, so no "w8".
SENSITIVE = {**dict.fromkeys(LINEAR, "w8"), "BATCH_MATMUL": "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerOptions:
    """Options for lowering."""

    static: Annotated[
        Literal["linear", "matmul", "all"],
        Option(
            "Operators that w8a8 and w8a16 quantize. linear: linears and convolutions; matmul: also the "
            "matrix multiplications of attention; all: whatever the quantizer supports"
        ),
    ] = "linear"
    sensitive: Sensitive = "w8"


@final
class LiteRt(Target):
    """Writes .tflite files with litert_torch, and runs them with LiteRT and XNNPACK on the CPU.

    Programs that share weights are signatures of one file, which stores equal weights once.
    """

    lower_options: ClassVar[type[Any]] = LowerOptions
    options = LowerOptions()
    spec = TargetSpec(
        name="litert",
        summary="LiteRT (TensorFlow Lite) with XNNPACK: phones and boards, Arm and x86 CPUs",
        supports=Support(
            max_rank=6,
            dtypes=frozenset(
                {"float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"}
            ),
            formats=frozenset({"torch", "tflite"}),
            limits=LIMITS,
            folds_constants=False,
            suggested_rewrites={"dropout": "drop-no-ops"},
        ),
        lowering=Lowering(
            rewrites=("drop-no-ops",),
            lowered_suffix=".tflite",
            # Fitted to bundles of tiny, base and small: 2.27, 3.45 and 8.74 GB, and 52, 116 and 296 s of
            # CPU time. Lowering one program after another of small took up to 5.8 GB.
            cost=LoweringCost(
                base_bytes=1.1e9, bundle_factor=8, program_factor=4.8, base_s=25, s_per_gb=290
            ),
        ),
        runs=Runs(precisions=("fp32", *PRECISIONS), timed_precisions=("w8",)),
        software=Software(
            runtime="ai-edge-litert",
            extra=EXTRA,
            run_extra=RUN_EXTRA,
            packages={
                RUN_EXTRA: (Package("ai_edge_litert", "ai-edge-litert"),),
                EXTRA: (
                    Package("torch", "torch"),
                    Package("litert_torch", "litert-torch"),
                    Package("ai_edge_quantizer", "ai-edge-quantizer"),
                    Package("tflite", "tflite"),
                ),
            },
        ),
        sources={
            "formats": "litert_torch 0.10.0 converts torch modules; LiteRT reads .tflite",
            "domains": "litert_torch 0.10.0 converts aten's operators; LiteRT has no ONNX operators",
            "static": "litert_torch converts dynamic shapes too; whisperport uses static shapes only",
            "folds_constants": "LiteRT 2.3 lists SELECT_V2 of constants among the operators that it runs",
            "max_rank": "google/XNNPACK include/xnnpack.h: XNN_MAX_TENSOR_DIMS is 6",
            "dtypes": "litert_torch 0.10.0, backend/export_utils.py; int64 becomes int32 in the file",
            "precisions": "ai-edge-quantizer 0.10.0, recipe.py and AlgorithmName.FLOAT_CASTING",
        },
    )

    def lower(self, programs: Sequence["Program"], folder: Path) -> list[ProgramEntry]:
        entries: dict[str, ProgramEntry] = {}
        for name, group in self._files(programs).items():
            entries |= self._lower_group(group, folder / FOLDER / f"{name}.tflite")
        return [
            replace(entry, files=tuple(f"{FOLDER}/{file}" for file in entry.files))
            for entry in (entries[program.name] for program in programs)
        ]

    def lower_file(
        self, program: "Program", path: Path, *, simplify: bool = False
    ) -> tuple[ProgramEntry, dict[str, Any]]:
        """Write one program to a .tflite file."""
        if simplify:
            return super().lower_file(program, path, simplify=simplify)
        entry = self._lower_group([program], path)[program.name]
        return entry, entry.facts.to_json()

    def calibration(self, spec: ProgramSpec, precision: str) -> CalibrationNeed | None:
        return static_calibration(spec) if precision in STATIC_BITS else None

    def quantize(
        self, entry: ProgramEntry, folder: Path, arrays: Mapping[str, Path]
    ) -> ProgramEntry:
        path = folder / entry.files[0]
        begin_stage(f"quantizing {entry.spec.name} to {entry.precision}")
        notes = quantize_statically(
            path,
            entry.spec,
            entry.precision,
            arrays,
            operators=OPERATORS[self.options.static],
            sensitive_in=SENSITIVE if self.options.sensitive == "w8" else {},
            target=self.spec.name,
            extra=EXTRA,
        )
        quantized = self._entry(entry.spec, path, entry.files[0])
        return replace(quantized, facts=replace(quantized.facts, notes=notes))

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        paths = {entry.files[0]: regular_file(folder, entry.files[0]) for entry in entries}
        files = {
            name: TfliteFile(path, options.cores, extra=RUN_EXTRA, target=self.spec.name)
            for name, path in paths.items()
        }
        return {
            entry.spec.name: TfliteRunner(entry.spec, files[entry.files[0]]) for entry in entries
        }

    def _files(self, programs: Sequence["Program"]) -> dict[str, list["Program"]]:
        """Return name of a file -> its programs: those that share weights and have the same precision.

        A program that is quantized statically has its own file.
        """
        files: dict[str, list[Program]] = {}
        for group in _sharing(programs):
            by_precision: dict[str, list[Program]] = {}
            for program in group:
                precision = self.precision_of(program.name)
                key = program.name if precision in STATIC_BITS else precision
                by_precision.setdefault(key, []).append(program)
            for together in by_precision.values():
                # LiteRT writes to inputs in place only in the first program of a file; `step` runs most.
                ordered = sorted(together, key=lambda program: program.name != "step")
                single = len(ordered) == 1 or ordered[0].spec.kind.name == ENCODER
                name = ordered[0].name if single else f"decoder-{ordered[0].name}"
                files[name] = ordered
        return files

    def _lower_group(self, programs: Sequence["Program"], path: Path) -> dict[str, ProgramEntry]:
        """Write programs of one precision to a file. Static quantization follows later, see `quantize`."""
        from whisperport.targets.tflite.lowering import lower_to_tflite

        lower_to_tflite(programs, path, target=self.spec.name, extra=EXTRA)
        precision = self.precision_of(programs[0].name)
        if precision in PRECISIONS and precision not in STATIC_BITS:
            begin_stage(f"quantizing {path.name} to {precision}")
            quantize_in_place(path, recipe(precision), target=self.spec.name, extra=EXTRA)
        return {p.name: self._entry(p.spec, path, path.name) for p in programs}

    def _entry(self, spec: ProgramSpec, path: Path, file: str) -> ProgramEntry:
        precision = self.precision_of(spec.name)
        return ProgramEntry(
            spec=spec,
            placement=Placement(self.spec.name, precision),
            method=spec.name,
            files=(file,),
            facts=ProgramFacts.of(xnnpack_delegation(path, spec.name)),
        )


def _sharing(programs: Iterable["Program"]) -> list[list["Program"]]:
    """Group programs that share a weight, also through another program."""
    groups: list[tuple[set[int], list[Program]]] = []
    for program in programs:
        weights, together = _weights(program), [program]
        for group in [group for group in groups if group[0] & weights]:
            groups.remove(group)
            weights, together = weights | group[0], [*group[1], *together]
        groups.append((weights, together))
    return [together for _, together in groups]


def _weights(program: "Program") -> set[int]:
    """Return the addresses of a program's weights."""
    tensors = (*program.exported.state_dict.values(), *program.exported.constants.values())
    return {
        tensor.data_ptr()
        for tensor in tensors
        if hasattr(tensor, "data_ptr") and tensor.numel() > 1024
    }


TARGETS = (LiteRt(),)


def xnnpack_delegation(path: Path, program: str) -> dict[str, Any]:
    """Return what XNNPACK runs of a program, as JSON for the manifest.

    Args:
        path: a .tflite file that this process wrote.
        program: key of the program's signature.
    """
    from whisperport.model.inspection.litert_run import listed_ops
    from whisperport.model.inspection.profile_tflite import DELEGATE, replaced
    from whisperport.model.inspection.tflite_signatures import read_signatures

    signature = read_signatures(path)[program]
    with _as_first(path, signature.subgraph):
        ops = listed_ops(TfliteFile(path, 1, extra="litert").interpreter)
    nodes = [op for op in ops if op.name != DELEGATE]
    calls = [op for op in ops if op.name == DELEGATE]
    delegated = {index for call in calls for index in replaced(call, nodes)}
    return {
        "delegated": len(delegated),
        "subgraphs": len(calls),
        "undelegated": [op.name for op in nodes if op.index not in delegated],
    }


@contextmanager
def _as_first(path: Path, subgraph: int) -> Iterator[None]:
    """Within the block, exchange the file's first subgraph for another. Signatures then name wrong ones."""
    if subgraph == 0:
        yield
        return
    from whisperport.model.inspection.tflite_signatures import exchange

    exchange(path, subgraph)
    try:
        yield
    finally:
        exchange(path, subgraph)
