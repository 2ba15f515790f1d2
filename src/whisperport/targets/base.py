"""The interface of a target: a spec, two methods, and optional parts that only some targets have."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from whisperport.errors import UsageError
from whisperport.program.bundle import ProgramEntry
from whisperport.program.dims import Dims
from whisperport.program.runner import Runner
from whisperport.program.spec import ProgramSpec, Rejection, TargetSpec, UncachedForm
from whisperport.system.machine import usable_cores
from whisperport.system.option import MAX_THREADS, check_range
from whisperport.targets.target_options import NoOptions, own_options, parse_options, with_target

if TYPE_CHECKING:  # boards have no torch, and do not compile
    from whisperport.model.trace.program import Program
    from whisperport.program.profiling import Profiler
    from whisperport.targets.compiler import CalibrationNeed, Compiler
    from whisperport.targets.execution_provider import ExecutionProvider
    from whisperport.targets.importer import Importer
    from whisperport.targets.partitioner import Partitioner


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One kind of machine, such as an instance type of a cloud.

    A core is what a program is compiled for. All figures are for one core.

    Attributes:
        name: name of the machine.
        cores: number of cores.
        memory_bytes: memory of the device for one core.
        reserved_bytes: memory that the vendor's own software takes from it.
        bandwidth: peak bandwidth of this memory, in bytes/s.
        flops: precision -> peak speed of dense matrix multiplications, in operations/s.
        source: the documents that the figures come from.
    """

    name: str
    cores: int
    memory_bytes: float
    reserved_bytes: float
    bandwidth: float
    flops: Mapping[str, float]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTimes:
    """Times that somebody measured on a machine and published, of OpenAI's models.

    Attributes:
        machine: name of the machine.
        precision: of the programs.
        software: with its version.
        source: where the times were published.
        encoder_ms: model -> time of a window of 30 s in the encoder, with the cross-attention K/V.
        token_ms: model -> time of one token.
        fitted: models whose times predictions follow from; the times of the others test them.
        context: rows of the self-attention cache, with which a token was measured.
    """

    machine: str
    precision: str
    software: str
    source: str
    encoder_ms: Mapping[str, float]
    token_ms: Mapping[str, float]
    fitted: tuple[str, ...]
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options for running a bundle's programs.

    Raises:
        UsageError: `threads` is below 1 or above `MAX_THREADS`.
    """

    threads: int | None = None  # CPU threads of each runtime; None: one per core (`usable_cores`)
    options: Mapping[str, str] = field(default_factory=dict)  # "TARGET.NAME" -> value
    trust: bool = False  # load programs of unknown origin without a trial run
    # Whether a window is as short as the rest of the audio allows. True: also where this is not verified.
    # False: never, as in openai-whisper. None: if the bundle has the evidence.
    short_windows: bool | None = None
    # Folder of an adapter of PEFT, for a bundle whose programs take adapters; None: none.
    adapter: Path | None = None

    def __post_init__(self) -> None:
        check_range("threads", self.threads, 1, MAX_THREADS)

    @property
    def cores(self) -> int:
        """CPU threads of each runtime."""
        return self.threads or usable_cores()

    def of(self, target: "Target") -> Any:
        """Return the options of one target, as an instance of its `run_options`.

        Raises:
            UsageError: the target has no option of this name, or a value is out of its range.
        """
        name = target.spec.name
        return parse_options(target.run_options, own_options(self.options, name), name)

    def with_emulation(self, targets: "Iterable[Target]") -> Self:
        """Return these options with emulation on the CPU, for each of the targets that has it.

        Options that are set already have priority.
        """
        emulation: dict[str, str] = {}
        for target in targets:
            emulation |= target.emulation_options
        return replace(self, options={**emulation, **self.options})


RunMode = Literal["device", "simulator", "quantized", "emulation"]
"""How a target runs programs.

device      The files of the bundle run on the device, or in the runtime, that they are for.
simulator   The compiled files run in the vendor's simulator.
quantized   The quantized programs, from which the compiled files were made, are emulated. They have the
            placement's precision, but running them is evidence of an emulation, and not of a simulation.
emulation   The lowered programs run on the CPU, in the target's `emulated_precision`.
"""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Why a target cannot run a program at all, and what to do instead."""

    why: str  # the reason
    hint: str  # what to do instead


class Target(ABC):
    """An accelerator or a runtime that runs programs. To add one, see docs/how-to/add-a-target.md."""

    spec: TargetSpec
    lower_options: ClassVar[type[Any]] = NoOptions  # options of `lower`; see `target_options.py`
    run_options: ClassVar[type[Any]] = NoOptions  # options of `load`
    compiler: "Compiler | None" = None  # the vendor's compiler for the files that `lower` writes
    importer: "Importer | None" = None  # reads files that the vendor's compiler wrote elsewhere
    partitioner: "Partitioner | None" = None  # tells which operators the vendor's own list accepts
    profiler: "Profiler | None" = None  # measures programs of a format that only this target has
    execution_provider: "ExecutionProvider | None" = None  # the vendor's provider in ONNX Runtime
    options: Any = NoOptions()  # an instance of `lower_options`; see `configured`
    precisions: Mapping[str, str] = MappingProxyType({})  # of programs; see `with_precisions`
    machines: "tuple[Machine, ...]" = ()  # machines whose figures are known, for `plan`
    published: "tuple[PublishedTimes, ...]" = ()  # from which `plan` predicts others

    def check(self, program: "Program") -> list[Rejection]:
        """List the nodes of a program that this target's spec rejects, with the value found and the limit.

        Needs torch, and neither an SDK nor a runtime.
        """
        from whisperport.model.inspection.read_exported import read_exported
        from whisperport.model.inspection.rejections import rejections

        return rejections(read_exported(program.name, program.exported), self.spec)

    @abstractmethod
    def lower(self, programs: Sequence["Program"], folder: Path) -> list[ProgramEntry]:
        """Lower programs into files of a bundle.

        Args:
            programs: after the target's rewrites.
            folder: of the bundle; the target writes into a subfolder with its own name.

        Returns:
            One entry per program, in the same order.

        Raises:
            MissingPackageError: the compiler or exporter is not installed.
            LoweringError: the compiler rejected a program.
        """

    def lower_file(
        self, program: "Program", path: Path, *, simplify: bool = False
    ) -> tuple[ProgramEntry, dict[str, Any]]:
        """Lower one program into files that it shares with no other program.

        Args:
            program: after the target's rewrites.
            path: path of the file, with `spec.lowering.lowered_suffix`. A target that writes a single file
                may choose another name in the same folder; else all names begin with the stem of `path`.
            simplify: simplify the ONNX graph.

        Returns:
            The entry of the program, with paths relative to the folder of `path` and the program's file
            first; and facts about the result to show to the user.

        Raises:
            UsageError: `simplify` is set and the target does not write ONNX.
            MissingPackageError: the compiler or exporter is not installed.
            LoweringError: the compiler rejected the program.
        """
        without_simplify(self.spec.name, simplify=simplify)
        (entry,) = self.lower([program], path.parent)
        return entry, entry.facts.to_json()

    @abstractmethod
    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        """Load lowered programs. Needs only the runtime, not the compiler.

        Args:
            folder: of the bundle.
            entries: the programs to load.

        Returns:
            Name of the program -> its runner.

        Raises:
            MissingPackageError: the runtime is not installed.
            BundleError: the runtime cannot read a file.
        """

    def configured(self, options: Any) -> Self:
        """Return this target with options for lowering.

        Args:
            options: an instance of `lower_options`.
        """
        target = copy(self)
        target.options = options
        return target

    def with_precisions(self, precisions: Mapping[str, str]) -> Self:
        """Return this target with the precision in which `lower` writes each program.

        Args:
            precisions: program -> its precision. A target whose compiler chooses the precision ignores it.
        """
        target = copy(self)
        target.precisions = dict(precisions)
        return target

    def precision_of(self, program: str) -> str:
        """Return the precision in which `lower` writes a program."""
        return self.precisions.get(program, self.spec.runs.precisions[0])

    def calibration(self, spec: ProgramSpec, precision: str) -> "CalibrationNeed | None":
        """Return the samples that `quantize` needs of a program; None: `lower` wrote its final file.

        Args:
            spec: the program's signature.
            precision: the program's precision.
        """
        return None

    def quantize(
        self, entry: ProgramEntry, folder: Path, arrays: Mapping[str, Path]
    ) -> ProgramEntry:
        """Quantize a program that `lower` wrote in float32, in place. Called if `calibration` asks for it.

        Args:
            entry: of the program, with its precision.
            folder: of the bundle.
            arrays: name of an input -> `.npy` file of its samples, (samples, ...).

        Raises:
            MissingPackageError: the quantizer is not installed.
            LoweringError: the quantizer could not quantize the program.
        """
        raise NotImplementedError(f"`{self.spec.name}` quantizes no program")

    @property
    def emulation_options(self) -> dict[str, str]:
        """Run options that choose emulation on the CPU, "TARGET.NAME" -> value; empty: there is none."""
        return with_target(self.spec.runs.emulation, self.spec.name)

    def run_mode(self, options: RunOptions) -> RunMode:
        """Return how `load` runs the programs with these options."""
        emulation = self.emulation_options
        chosen = bool(emulation) and emulation.items() <= options.options.items()
        return "emulation" if chosen else "device"

    def emulated_precision(self, precision: str) -> str:
        """Return the precision in which `spec.runs.emulation` runs a program on the CPU.

        Args:
            precision: the program's precision on the device.
        """
        return "fp32"

    def uncached_form(self, dims: Dims) -> UncachedForm | None:
        """Return the form of `uncached_decoder` for these sizes; None: this target does not run it."""
        return None

    def unsupported(self, program: str, precision: str) -> Unsupported | None:
        """Return why this target cannot run a program in a precision; None: it can, as far as is known.

        `export` calls this before it reads the checkpoint.

        Args:
            program: name of a Whisper program, such as "encoder".
            precision: a precision that the user asks for, or the target's default precision.
        """
        return None

    def too_large(self, dims: Dims) -> str:
        """Return why a checkpoint of these sizes is too large for the target's compiler; else ""."""
        return ""


def without_simplify(target: str, *, simplify: bool) -> None:
    """Check that the option is not set for a target that writes no ONNX.

    Raises:
        UsageError: it is.
    """
    if simplify:
        raise UsageError(
            f"`--simplify` is not supported for the target `{target}`",
            why="it simplifies ONNX files, and this target does not write any",
            hint="run the command without `--simplify`",
        )
