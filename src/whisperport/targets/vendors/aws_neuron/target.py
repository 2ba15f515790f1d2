"""The target `aws-neuron`: AWS Inferentia2 and Trainium, through torch-neuronx or TorchNeuron."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast, final

from whisperport.errors import UsageError
from whisperport.program.bundle import ProgramEntry
from whisperport.program.bundle.program_entry import ProgramFacts
from whisperport.program.masks import MASKED
from whisperport.program.placement import Placement
from whisperport.program.runner import Runner
from whisperport.program.spec import Lowering, Package, Runs, Software, Support, TargetSpec
from whisperport.system.progress import begin_stage
from whisperport.targets.base import RunOptions, Target
from whisperport.targets.target_options import Option, check_ranges
from whisperport.targets.vendors.aws_neuron.chips import RELEASE, machines
from whisperport.targets.vendors.aws_neuron.compiler import DESCRIPTION, WEIGHTS, NeuronCompiler
from whisperport.targets.vendors.aws_neuron.runtime import import_torch, load_modules

if TYPE_CHECKING:  # boards have no torch
    from whisperport.model.trace.program import Program

NAME = "aws-neuron"
TRACE = f"{RELEASE} api-torch-neuronx-trace.rst"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """Options for running.

    Raises:
        UsageError: a number is out of its range.
    """

    emulate: Annotated[
        Literal["off", "on"],
        Option(
            "on runs the modules that would be compiled in emulation on the CPU, with torch; off runs "
            "the compiled programs on a NeuronCore"
        ),
    ] = "off"
    core: Annotated[
        int,
        Option(
            "Number of the NeuronCore that runs the programs, among those that this process sees",
            low=0,
            high=1023,
        ),
    ] = 0

    torch_compile: Annotated[
        Literal["off", "neuron", "inductor", "aot_eager"],
        Option(
            "Backend of torch.compile, which compiles each program when it first runs: neuron for "
            "Trainium2 and Trainium3, with TorchNeuron; the others of torch for the CPU, with emulate=on; "
            "off: nothing is compiled here"
        ),
    ] = "off"

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.torch_compile != "off" and (self.torch_compile == "neuron") == self.is_emulated:
            raise UsageError(
                f"`aws-neuron.torch-compile={self.torch_compile}` contradicts "
                f"`aws-neuron.emulate={self.emulate}`",
                why="neuron runs programs on a NeuronCore, and all other backends on the CPU",
                hint="use torch-compile=neuron with emulate=off, or another backend with emulate=on",
            )

    @property
    def is_emulated(self) -> bool:
        """Whether programs run on the CPU."""
        return self.emulate == "on"


@final
class AwsNeuron(Target):
    """AWS Inferentia2 and Trainium. Programs are modules whose state stays on the device.

    The bundle has a description and a weight file for each precision, and no Python code: `compile` writes
    its own copy of `neuron_modules.py` into the work folder, because a bundle may come from elsewhere.
    """

    spec = TargetSpec(
        name=NAME,
        summary="AWS Inferentia2 and Trainium: all programs on a NeuronCore, with resident state",
        supports=Support(dtypes=frozenset({"float32", "bfloat16", "int32", "int64", "bool"})),
        lowering=Lowering(
            masks={"bf16": MASKED},  # bfloat16 has the range of float32
            # Second-hand: jimburtoft/neuronx-distributed-inference@019e42e,
            # whisper-large-v3-turbo/README.md: 4 rows use the hardware best, and 8 are not recommended.
            # This project has not measured it.
            batch=4,
            lowered_suffix=DESCRIPTION,
        ),
        runs=Runs(precisions=("fp32", "bf16"), emulation={"emulate": "on"}),
        software=Software(
            runtime="torch-neuronx",
            emulation_runtime="torch",
            extra="export",
            run_extra=NAME,
            packages={
                NAME: (
                    Package(
                        "torch_neuronx",
                        "torch-neuronx",
                        "get torch-neuronx from AWS's own index: for torch 2.9, or on Trainium2 and 3 for "
                        "torch 2.13",
                    ),
                )
            },
        ),
        sources={
            "dtypes": f"{RELEASE} compiler/neuronx-cc: int64 is computed in int32 by default",
            "max_rank": "torch: no document of AWS states a limit of the rank",
            "formats": f"{TRACE}: the tracer gets a torch module",
            "domains": f"{TRACE}: the tracer gets a torch module, which has no ONNX operators",
            "static": f"{TRACE}: fixed input shapes",
            "precisions": f"{RELEASE} compiler/neuronx-cc: --auto-cast none keeps the program's types",
        },
    )
    run_options: ClassVar[type[Any]] = DeviceOptions
    compiler = NeuronCompiler()
    machines = machines()

    def emulated_precision(self, precision: str) -> str:
        """Return the same precision: on the CPU, modules compute in bfloat16 too."""
        return precision

    def lower(self, programs: Sequence["Program"], folder: Path) -> list[ProgramEntry]:
        """Write the programs of each precision to a description and a weight file."""
        entries: dict[str, ProgramEntry] = {}
        for precision in self.spec.runs.precisions:
            group = [
                program for program in programs if self.precision_of(program.name) == precision
            ]
            if group:
                begin_stage(
                    f"writing the weights of {', '.join(program.name for program in group)}"
                )
                path = folder / NAME / f"{precision}{DESCRIPTION}"
                entries |= self._written(group, path, f"{NAME}/{path.name}")
        return [entries[program.name] for program in programs]

    def lower_file(
        self, program: "Program", path: Path, *, simplify: bool = False
    ) -> tuple[ProgramEntry, dict[str, Any]]:
        """Write one program to a description and a weight file beside it."""
        if simplify:
            return super().lower_file(program, path, simplify=simplify)
        path = path.with_suffix(DESCRIPTION)
        entry = self._written([program], path, path.name)[program.name]
        return entry, entry.facts.to_json()

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        chosen = cast(DeviceOptions, options.of(self))
        core = None if chosen.is_emulated else chosen.core
        backend = None if chosen.torch_compile == "off" else chosen.torch_compile
        return load_modules(folder, entries, core, options.cores, backend)

    def _written(
        self, programs: Sequence["Program"], path: Path, file: str
    ) -> dict[str, ProgramEntry]:
        from whisperport.targets.vendors.aws_neuron.lowering import lower_programs

        import_torch()
        precision = self.precision_of(programs[0].name)
        nodes = lower_programs(programs, precision, path)
        files = (file, file.removesuffix(DESCRIPTION) + WEIGHTS)
        return {
            program.name: ProgramEntry(
                spec=program.spec,
                placement=Placement(NAME, precision),
                method=program.name,
                files=files,
                facts=ProgramFacts(delegated=nodes[program.name], undelegated=(), subgraphs=1),
            )
            for program in programs
        }


TARGETS = (AwsNeuron(),)
