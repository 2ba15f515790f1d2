"""The target `openvino`: what it supports, and its lowering and loading."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast, final

from whisperport.errors import BundleError, UsageError
from whisperport.program.bundle import ProgramEntry, regular_file
from whisperport.program.bundle.program_entry import ProgramFacts
from whisperport.program.placement import Placement
from whisperport.program.runner import Runner
from whisperport.program.spec import Lowering, Package, Runs, Software, Support, TargetSpec
from whisperport.system.machine import instruction_sets
from whisperport.system.option import MAX_THREADS
from whisperport.targets.base import RunOptions, Target
from whisperport.targets.cpu.openvino.ir_graph import STATE
from whisperport.targets.cpu.openvino.partitioner import NpuPartitioner
from whisperport.targets.cpu.openvino.profiler import WEIGHTS, OpenVinoProfiler
from whisperport.targets.cpu.openvino.runtime import (
    CPU,
    NPU,
    Device,
    OpenVinoRunner,
    has_bf16,
    start,
)
from whisperport.targets.execution_provider import ExecutionProvider
from whisperport.targets.target_options import Option, check_ranges

if TYPE_CHECKING:  # boards have no torch
    from whisperport.model.trace.program import Program

EXTRA, RUN_EXTRA = "openvino-export", "openvino"
BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # instruction sets
DEVICE = re.compile(r"CPU|NPU|GPU(\.[0-9]{1,2})?")


# Of ONNX Runtime, in the package onnxruntime-ep-openvino. Where a CPU multiplies bfloat16, it computes so.
PROVIDER = ExecutionProvider(
    name="OpenVINOExecutionProvider",
    precision="bf16",
    trials=({}, {"load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'}),
    sources={
        "precision": "measured with onnxruntime-ep-openvino 1.8.1 on a CPU with AMX: 42 dB or more; in "
        "float32 118 dB",
        "trials": "onnxruntime.ai, OpenVINO Execution Provider: load_config",
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Options for running.

    Raises:
        UsageError: a value is out of its range.
    """

    device: Annotated[
        str,
        Option(
            "OpenVINO's device that runs the programs: CPU, GPU, GPU.1 or NPU. This project ran the CPU "
            "only"
        ),
    ] = CPU
    streams: Annotated[
        int,
        Option(
            "Number of runs of one program that the device computes in parallel, for several threads that "
            "share a transcriber. Each stream gets its share of --threads",
            low=1,
            high=MAX_THREADS,
        ),
    ] = 1

    def __post_init__(self) -> None:
        check_ranges(self)
        if not DEVICE.fullmatch(self.device):
            raise UsageError(
                f"the option `openvino.device` cannot be `{self.device[:40]}`",
                hint="expected CPU, GPU, GPU.0, GPU.1 or NPU",
            )


class OpenVino(Target):
    """Writes one OpenVINO model per program and one file of weights for all programs; runs them."""

    run_options: ClassVar[type[Any]] = DeviceOptions
    execution_provider = PROVIDER
    profiler: OpenVinoProfiler | None = OpenVinoProfiler()
    spec = TargetSpec(
        name="openvino",
        summary="OpenVINO on x86 and Arm CPUs, and on Intel's GPUs and NPUs",
        supports=Support(
            dtypes=frozenset({"float32", "float16", "int64", "int32", "bool"}),
            formats=frozenset({"torch", "ir"}),
            static=False,
            domains=frozenset({STATE}),
        ),
        lowering=Lowering(sums_exponentials=True, lowered_suffix=".xml"),
        runs=Runs(
            any_audio=True,
            precisions=("fp32", "fp16", "w8", "bf16"),
            # In float32 it is as fast as ONNX Runtime; bfloat16 saves time where the CPU multiplies it.
            timed_precisions=("w8", *["bf16"] * bool(BF16.intersection(instruction_sets()))),
            trial_options={"device": CPU},
        ),
        software=Software(
            runtime="openvino",
            extra=EXTRA,
            run_extra=RUN_EXTRA,
            packages={
                RUN_EXTRA: (Package("openvino", "openvino"),),
                EXTRA: (
                    Package("torch", "torch"),
                    Package("onnx", "onnx"),
                    Package("onnxscript", "onnxscript"),
                    Package("openvino", "openvino"),
                ),
            },
        ),
        sources={
            "formats": "torch programs are converted to ONNX first, which OpenVINO reads; its own format "
            "is IR, .xml",
            "domains": "whisperport's conversion writes ONNX's own operators only; OpenVINO's models may "
            "have states",
            "static": "OpenVINO's CPU and GPU run dynamic shapes, its NPU does not; whisperport writes "
            "static shapes only",
            "dtypes": "openvino 2026.4 ov::element::Type, of those that the ONNX conversion writes",
            "max_rank": "openvino src/plugins/intel_cpu: MAX_ELTWISE_DIM_RANK is 12; 8 is "
            "the limit of other compilers",
            "precisions": "stored weights, except bf16; the CPU computes in float32 or, in bf16, in "
            "bfloat16, by INFERENCE_PRECISION_HINT",
        },
    )

    def lower(self, programs: Sequence["Program"], folder: Path) -> list[ProgramEntry]:
        own = folder / self.spec.name
        models = [own / f"{program.name}.xml" for program in programs]
        return self._lower(programs, models, own / WEIGHTS, f"{own.name}/")

    def lower_file(
        self, program: "Program", path: Path, *, simplify: bool = False
    ) -> tuple[ProgramEntry, dict[str, Any]]:
        """Write one program to `path`, and its weights to `STEM.bin`, where OpenVINO looks for them."""
        if simplify:
            return super().lower_file(program, path, simplify=simplify)
        (entry,) = self._lower([program], [path], path.with_suffix(".bin"), "")
        return entry, entry.facts.to_json()

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        device = self._device(options)
        core = start(device)
        runners: dict[str, Runner] = {}
        for entry in entries:
            properties = device.properties(
                bf16=entry.precision == "bf16" and has_bf16(core, device),
                w8=entry.precision == "w8",
            )
            files = _files(folder, entry)
            runners[entry.spec.name] = OpenVinoRunner(
                core,
                entry.spec,
                *files,
                device,
                properties,
                any_audio=options.short_windows is True,
            )
        return runners

    def _device(self, options: RunOptions) -> Device:
        chosen = cast(DeviceOptions, options.of(self))
        return Device(name=chosen.device, threads=options.cores, streams=chosen.streams)

    def _lower(
        self,
        programs: Sequence["Program"],
        models: Sequence[Path],
        weights: Path,
        prefix: str,
    ) -> list[ProgramEntry]:
        """Write programs to `models`. The paths of the entries begin with `prefix`."""
        from whisperport.targets.cpu.openvino.lowering import lower_to_openvino

        precisions = [self.precision_of(p.name) for p in programs]
        nodes = lower_to_openvino(programs, models, precisions, weights, self.spec.name)
        return [
            ProgramEntry(
                spec=program.spec,
                placement=Placement(self.spec.name, precision),
                method=program.name,
                files=(f"{prefix}{model.name}", f"{prefix}{weights.name}"),
                facts=ProgramFacts(delegated=count, undelegated=(), subgraphs=1),
            )
            for program, model, precision, count in zip(
                programs, models, precisions, nodes, strict=True
            )
        ]


def _files(folder: Path, entry: ProgramEntry) -> tuple[Path, Path]:
    """Return the paths of a program's model and weights.

    Raises:
        BundleError: the entry lists other files, or one is not a regular file of the bundle.
    """
    if len(entry.files) != 2:
        raise BundleError(
            f"`{entry.spec.name}` lists {len(entry.files)} files",
            why="a program on `openvino` has a .xml file and a .bin file",
            hint="export the bundle again",
        )
    model, weights = (regular_file(folder, file) for file in entry.files)
    return model, weights


@dataclass(frozen=True, slots=True, kw_only=True)
class NpuOptions:
    """Options for running."""

    emulate: Annotated[
        Literal["off", "on"],
        Option(
            "on lets the NPU's plugin rewrite the programs and run their parts on the CPU, in float32; off "
            "runs them on an NPU"
        ),
    ] = "off"


@final
class OpenVinoNpu(OpenVino):
    """Writes the same files for an NPU. Without one, its plugin rewrites them and runs them on the CPU."""

    run_options: ClassVar[type[Any]] = NpuOptions
    profiler = None  # the same files
    partitioner = NpuPartitioner()
    spec = replace(
        OpenVino.spec,
        name="openvino-npu",
        summary="Intel's NPUs, by OpenVINO; the rest on the CPU. Not run on an NPU by this project",
        runs=Runs(
            programs=frozenset({"encoder", "cross_kv"}),
            fallback=OpenVino.spec.name,
            precisions=("fp16", "w8"),
            timed_precisions=("fp16", "w8"),
            emulation={"emulate": "on"},
        ),
        software=replace(OpenVino.spec.software, emulation_runtime="openvino"),
        sources={
            **OpenVino.spec.sources,
            "static": "the NPU's plugin makes the shapes of a Whisper decoder static",
            "precisions": "stored weights; an NPU computes in float16 in any case",
        },
    )

    def emulated_precision(self, precision: str) -> str:
        return precision

    def _device(self, options: RunOptions) -> Device:
        chosen = cast(NpuOptions, options.of(self))
        return Device(name=NPU, emulated=chosen.emulate == "on")


TARGETS = (OpenVino(), OpenVinoNpu())
