"""The MediaTek targets: write and quantize .tflite files for the compiler; run or emulate programs.

MediaTek's execution provider of ONNX Runtime is described as data: this project has never run it.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, final

from whisperport.program.bundle import ProgramEntry, regular_file
from whisperport.program.bundle.program_entry import ProgramFacts
from whisperport.program.placement import Placement
from whisperport.program.program_kind import kind_of
from whisperport.program.runner import Runner
from whisperport.program.spec import ProgramSpec
from whisperport.system.progress import begin_stage
from whisperport.targets.base import Unsupported
from whisperport.targets.compiled_target import CompiledTarget
from whisperport.targets.compiler import CalibrationNeed
from whisperport.targets.execution_provider import ExecutionProvider
from whisperport.targets.quantizing import static_calibration
from whisperport.targets.target_options import Option
from whisperport.targets.tflite.quantization import MATMUL, OPERATORS, STATIC_BITS
from whisperport.targets.tflite.quantize_in_place import quantize_statically
from whisperport.targets.vendors.mediatek.chips import CHIPS, MDLA_2_0, Chip
from whisperport.targets.vendors.mediatek.compiler import NccCompiler
from whisperport.targets.vendors.mediatek.device_io import DeviceIo
from whisperport.targets.vendors.mediatek.neuronrt import DeviceOptions, NeuronrtRunner
from whisperport.targets.vendors.mediatek.partitioner import LiteRtPartitioner
from whisperport.targets.vendors.mediatek.specs import FLOAT, spec_of

if TYPE_CHECKING:  # boards have no torch
    from whisperport.model.trace.program import Program

# Programs without attention: linears only. All others multiply two activations in their attention.
WITHOUT_ATTENTION = frozenset({"cross_kv", "vocab_projection"})
ON_THE_CPU = "run Whisper on its CPU: export with `--target litert`"
DEVICE_IO = "device_io"  # in `ProgramFacts.target_facts`: inputs and outputs of the .tflite

log = logging.getLogger(__name__)


GUIDE = "MediaTek's Genio community, guide of the NeuronExecutionProvider"


USERS = "second-hand: users' projects on Genio 520 and Genio 720, with ONNX Runtime 1.20.2"


STATIC = "quantize statically, with QuantizeLinear and DequantizeLinear (QDQ)"


NEURON = ExecutionProvider(
    name="NeuronExecutionProvider",
    precision="fp16",
    min_opset=13,
    unsupported={
        "DynamicQuantizeLinear": STATIC,
        "MatMulInteger": STATIC,
        "ConvInteger": STATIC,
    },
    options={
        "NEURON_FLAG_USE_FP16": "compute in float16; the NPU does not run float32",
        "NEURON_FLAG_MIN_GROUP_SIZE": "smallest number of nodes that are given to the NPU together",
        "NEURON_FLAG_OPTIMIZATION_STRING": "options of MediaTek's compiler",
        "NEURON_FLAG_USE_NCHW": "layout with channels first",
        "NEURON_FLAG_CPU_DISABLED": "forbid Neuron's own CPU device",
        "NEURON_FLAG_CPU_ONLY": "use Neuron's own CPU device only",
        "NEURON_FLAG_MDLA_ONLY": "use the MDLA only",
        "NEURON_FLAG_FORCE_SKIP_OPS_STRING": "operators that stay on ONNX Runtime's CPU provider",
    },
    defaults={
        "NEURON_FLAG_USE_FP16": "1",
        "NEURON_FLAG_OPTIMIZATION_STRING": "--opt=3 --num-mdla=1 --reshape-to-4d",
    },
    # With 0, a large BatchMatMul on Genio 720 was wrong by up to 29; with 100 it stayed on the CPU.
    trials=({"NEURON_FLAG_MIN_GROUP_SIZE": "0"}, {"NEURON_FLAG_MIN_GROUP_SIZE": "100"}),
    sources={
        "precision": f'{GUIDE}: "the NPU does not support FP32 execution"',
        "min_opset": f"{GUIDE}: Softmax of older opsets is rejected",
        "unsupported": f"{GUIDE}: 8-bit models must be QDQ, not dynamically quantized",
        "options": f"{GUIDE}; {USERS}",
        "trials": USERS,
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerOptions:
    """Options for lowering."""

    static: Annotated[
        Literal["linear", "matmul", "all"],
        Option(
            "Operators that w8a8 and w8a16 quantize; all others compute in float16. linear: linears and "
            "convolutions; matmul: also the matrix multiplications of attention; all: whatever the "
            "quantizer supports"
        ),
    ] = "linear"


@final
class Genio(CompiledTarget):
    """The target for one board. Lowered .tflite files can be emulated on the CPU before compilation."""

    lower_options: ClassVar[type[Any]] = LowerOptions
    options = LowerOptions()
    run_options: ClassVar[type[Any]] = DeviceOptions
    execution_provider = NEURON

    def __init__(self, chip: Chip) -> None:
        self.chip, self.spec = chip, spec_of(chip)
        self.compiler = NccCompiler(chip)
        self.partitioner = LiteRtPartitioner(chip)

    def unsupported(self, program: str, precision: str) -> Unsupported | None:
        chip, npu = self.chip, self.chip.npu
        if npu.engine == "vpu":
            return Unsupported(
                f"{chip.board} ({chip.soc}) has no MDLA, MediaTek's accelerator of neural networks; its "
                "VPU supports quantized convolutions, and no list of its operators contains attention",
                ON_THE_CPU,
            )
        if precision == "w8a16" and not npu.w8a16:
            return Unsupported(
                f"{npu.name} of {chip.board} ({chip.soc}) has no 16-bit activations with 8-bit weights "
                "(16x8)",
                f"use `fp16`, the default, for linears such as `cross_kv`; {ON_THE_CPU}",
            )
        if npu is MDLA_2_0 and kind_of(program).name not in WITHOUT_ATTENTION:
            return Unsupported(
                f"{npu.name} of {chip.board} ({chip.soc}) does not support transformers, and `{program}` "
                f"contains attention (source: {npu.sources['transformer']})",
                f"{ON_THE_CPU}; `--placement cross_kv={chip.name}` then places the linears of the "
                "cross-attention K/V on the NPU",
            )
        return None

    def emulated_precision(self, precision: str) -> str:
        """Return the precision of the lowered file: float32 if the NPU computes it in float16."""
        return "fp32" if precision == FLOAT else precision

    def lower_file(
        self, program: "Program", path: Path, *, simplify: bool = False
    ) -> tuple[ProgramEntry, dict[str, Any]]:
        """Write one program in float32 to a .tflite file."""
        from whisperport.targets.tflite.lowering import lower_to_tflite

        if simplify:
            return super().lower_file(program, path, simplify=simplify)
        target = self.spec.name
        lower_to_tflite([program], path, target=target, extra=self.spec.software.extra)
        entry = ProgramEntry(
            spec=program.spec,
            placement=Placement(target, FLOAT),
            method=program.name,
            files=(path.name,),
            facts=self._checked(path, program.spec),
        )
        return entry, {"nodes": entry.facts.delegated}

    def calibration(self, spec: ProgramSpec, precision: str) -> CalibrationNeed | None:
        return static_calibration(spec) if precision in STATIC_BITS else None

    def quantize(
        self, entry: ProgramEntry, folder: Path, arrays: Mapping[str, Path]
    ) -> ProgramEntry:
        name = entry.spec.name
        if name == "encoder" and entry.precision == "w8a8":
            log.warning(
                "`encoder` in w8a8 on %s: an activation has one 8-bit scale for all channels, and "
                "Whisper's encoder has channels with outliers; %s",
                self.spec.name,
                "MediaTek's own export of Whisper uses w8a16 by default"
                if "w8a16" in self.spec.runs.precisions
                else f"{FLOAT} has no such error",
            )
        begin_stage(f"quantizing {name} to {entry.precision}")
        path = folder / self.lowered_file(entry)
        sensitive_precision = "w8a16" if "w8a16" in self.spec.runs.precisions else "fp32"
        notes = quantize_statically(
            path,
            entry.spec,
            entry.precision,
            arrays,
            operators=OPERATORS[self.options.static],
            sensitive_in=dict.fromkeys(MATMUL, sensitive_precision),
            target=self.spec.name,
            extra=self.spec.software.extra,
        )
        facts = replace(self._checked(path, entry.spec), notes=notes)
        return replace(entry, facts=facts)

    def load_lowered(
        self, folder: Path, entry: ProgramEntry, file: str, threads: int | None
    ) -> Runner:
        from whisperport.targets.tflite.runner import TfliteFile, TfliteRunner

        path = regular_file(folder, file)
        loaded = TfliteFile(
            path, threads, extra=self.spec.software.run_extra, target=self.spec.name
        )
        return TfliteRunner(entry.spec, loaded)

    def load_compiled(
        self, entries: Sequence[ProgramEntry], files: Mapping[str, Path], options: Any
    ) -> dict[str, Runner]:
        """Load programs for `neuronrt` on this board, which this project has never run on one."""

        io = {
            entry.spec.name: DeviceIo.from_json(entry.facts.target_facts[DEVICE_IO], entry.spec)
            for entry in entries
            if DEVICE_IO in entry.facts.target_facts
        }
        name = self.spec.name
        return {
            spec.name: NeuronrtRunner(
                name, spec, files[spec.name], io.get(spec.name) or DeviceIo.of_spec(spec), options
            )
            for spec in (entry.spec for entry in entries)
        }

    def _checked(self, path: Path, spec: ProgramSpec) -> ProgramFacts:
        """Check the operators of a .tflite file, and describe the file for the program's entry.

        Raises:
            LoweringError: the NPU does not support one of its nodes; the file is deleted.
        """
        from whisperport.model.inspection.read_tflite import read_tflite
        from whisperport.model.inspection.rejections import rejections

        (graph,) = read_tflite(path)
        rejected = rejections(graph, self.spec)
        if rejected:
            path.unlink()
        self.expect_supported(spec.name, rejected)
        return ProgramFacts(
            delegated=len(graph.nodes),
            undelegated=(),
            subgraphs=1,
            target_facts={DEVICE_IO: DeviceIo.of_tflite(path, spec).to_json()},
        )


TARGETS = tuple(map(Genio, CHIPS))
