"""The interface of a vendor's compiler: its inputs, its stages, and the check of its output.

A subclass describes these. `compiling` uses the description, and `toolchain` runs the stages in the
Python interpreter that has the vendor's SDK, or with the vendor's command-line program.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import numpy as np

from whisperport.program.dims import Dims
from whisperport.program.runner import Array
from whisperport.program.spec import ProgramSpec
from whisperport.targets.target_options import NoOptions
from whisperport.targets.toolchain import Failure, Installed, Stage, find_command, find_interpreter

Layout = Callable[[Array], Array]
"""Converts one sample of one input to the order of axes that a compiler expects; values do not change."""


def same_layout(array: Array) -> Array:
    """Return the sample as it is, for compilers that expect the layout of the program's inputs."""
    return array


def undone(layout: Layout, sample: Array, shape: Sequence[int]) -> Array:
    """Return one sample of an input in the program's own order of axes.

    Args:
        layout: that of the sample.
        sample: its values.
        shape: of the program's input.
    """
    # A layout only moves values. Applied to the indices of the values, it gives the source of each value.
    # float32 holds integers exactly up to 16 million, 40 times the number of values in a spectrogram.
    source = layout(np.arange(sample.size, dtype=np.float32).reshape(shape))
    restored = np.empty(sample.size, sample.dtype)
    restored[source.ravel().astype(np.int64)] = sample.ravel()
    return restored.reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationNeed:
    """The calibration set that a compiler needs for one program: samples of the program's inputs."""

    samples: int  # number of samples
    names: tuple[str, ...]  # name of each input's array, in the order of the program's inputs
    layout: Layout = same_layout
    dtype: str = "float32"
    fewer_hint: str = ""  # hint how to need fewer samples: "`--option …` needs fewer"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationNeed:
    """Inputs and outputs of a vendor's emulator of quantized programs.

    One of the stages in the plan reads the inputs and writes the outputs: `.npy` arrays of shape
    (samples, ...) in the program's folder. The samples are made from the bundle's reference clips, not
    from the calibration set. whisperport compares the outputs with the reference.
    """

    inputs: tuple[str, ...]  # names of arrays, in the order of the program's inputs
    outputs: tuple[str, ...]  # names of arrays, in the order of the program's outputs
    layout: Layout = same_layout  # of one sample of one input
    # simulated: the stage runs the compiled file as the device would. emulated: it runs the quantized
    # program from which the compiled file is made.
    kind: Literal["emulated", "simulated"] = "emulated"
    clips: int = 0  # number of the reference's clips, the first ones; 0: all that the program needs
    decides: bool = False  # a program whose comparisons fail is not written, as after a simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """A request to compile one program."""

    spec: ProgramSpec
    dims: Dims
    options: Any  # an instance of the compiler's options class
    folder: Path  # the program's folder in the work folder; it contains all files below
    files: tuple[str, ...]  # the lowered files
    arrays: tuple[str, ...] = ()  # the calibration set: one `.npy` per input, (samples, ...)
    samples: int = 0  # number of calibration samples
    emulation: tuple[str, ...] = ()  # inputs of the emulator: one `.npy` per input; empty: none


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilePlan:
    """How one program is compiled."""

    stages: tuple[Stage, ...]
    artifact: str  # name of the compiled file, which one of the stages writes
    settings: Mapping[str, Any] = field(default_factory=dict)  # JSON for the stage script
    keep: tuple[str, ...] = ()  # other files of the folder that are copied into the bundle
    notes: tuple[str, ...] = ()  # sentences that the user should read


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A compiler's own estimate of a program on its device. Nothing was run or measured.

    Attributes:
        seconds: time of one run.
        cycles: clock cycles of one run.
        memory_bytes: name of a memory -> bytes that the program uses there.
        conditions: the device and the memory system that the estimate is for, in the vendor's words.
    """

    seconds: float
    cycles: float
    memory_bytes: Mapping[str, float]
    conditions: str


# What happened, as words that follow the compiler's title; and a hint, in which {target} and {program} are
# the names of the target and of the program.
Explanation = tuple[str, str]

# Class of an error that the stages of several compilers raise -> what happened.
_FAILURES: Mapping[str, Explanation] = {
    "MemoryError": ("ran out of memory", "use a machine with more memory, or a smaller checkpoint"),
    "SimulationError": (
        "could not run the compiled program in its simulator",
        "`--option {target}.emulate=0` compiles without simulation",
    ),
    "NotWrittenError": ("reported success and wrote no file", "check the free disk space"),
}
# Stage of several compilers -> what any error in it means.
_FAILED_STAGES: Mapping[str, Explanation] = {
    "simulate": (
        "could not run the compiled program in its simulator",
        "`--option {target}.emulate=0` compiles without simulation",
    ),
    "emulate": (
        "could not run the quantized program in its emulator",
        "`--option {target}.emulate=0` compiles without emulation",
    ),
}
_OTHER_FAILURE: Explanation = (
    "failed",
    "finished stages are kept: the same command continues with the failed stage",
)


class Compiler(ABC):
    """The description of a vendor's compiler. It does not import the SDK."""

    target: str  # name of the target, in hints
    title: str  # name in errors, with the versions that support the target
    toolchain: ClassVar[str]  # name in `--toolchain NAME=PATH`
    sdk: ClassVar[
        str
    ]  # import name of the SDK's Python package; or name of its command-line program
    is_command: ClassVar[bool] = False  # whether the SDK is a command-line program
    variables: ClassVar[
        tuple[str, ...]
    ] = ()  # the vendor's own variables for the folder of such an SDK
    source: ClassVar[str]  # where to get the SDK, shown to the user
    required: Mapping[str, Any] = MappingProxyType({})  # versions: `version_fault` of kit.py
    script: ClassVar[Path]  # the stage script; see `toolchain/driver.py` for what it must define
    options: ClassVar[type[Any]] = NoOptions  # see `target_options.py`
    suffix: ClassVar[str]  # file name suffix of a compiled artifact, such as ".bin"
    runs: ClassVar[Literal["simulated", "emulated", ""]] = ""  # what a stage does besides compiling
    layout: ClassVar[Layout] = staticmethod(same_layout)  # of one sample of an emulator's input
    decides: ClassVar[bool] = False  # see `EmulationNeed`; a simulation always decides
    failures: ClassVar[Mapping[str, Explanation]] = {}  # class of a stage's error -> what happened

    def installed(self, places: Mapping[str, str]) -> Installed | None:
        """Find the SDK on this machine; None: it is not here.

        Args:
            places: toolchain -> Python interpreter, or folder of the SDK.

        Raises:
            UsageError: the named path does not exist, or is not a Python interpreter.
        """
        if self.is_command:
            return find_command(self.toolchain, self.sdk, self.variables, places)
        interpreter = find_interpreter(self.toolchain, self.sdk, places)
        return Installed(interpreter, interpreter) if interpreter is not None else None

    def in_precision(self, precision: str) -> Self:
        """Return this compiler for a program that it quantizes, or computes, in a precision.

        Args:
            precision: the program's precision. A compiler with one precision per chip ignores it.
        """
        return self

    def settings(self) -> Mapping[str, Any]:
        """Return JSON for every stage of every program, such as the chip and the supported SDK versions."""
        return {"chip": self.target, "requires": {"chip": self.target, **self.required}}

    def calibration(self, spec: ProgramSpec, dims: Dims, options: Any) -> CalibrationNeed | None:
        """Return the calibration set that a program needs; None: none, as if `export` quantizes."""
        return None

    def emulation(self, spec: ProgramSpec, options: Any) -> EmulationNeed | None:
        """Return inputs and outputs of the vendor's emulator; None: there is none, or it is turned off.

        A compiler with `runs` has an option `emulate`: the number of the reference's clips; 0: off.
        """
        if not self.runs or not options.emulate:
            return None
        return EmulationNeed(
            inputs=tuple(f"{self.runs}_{tensor.name}" for tensor in spec.inputs),
            outputs=tuple(f"{self.runs}_output_{tensor.name}" for tensor in spec.outputs),
            layout=type(self).layout,
            kind=self.runs,
            clips=options.emulate,
            decides=self.decides,
        )

    @abstractmethod
    def plan(self, request: CompileRequest) -> CompilePlan:
        """Write the vendor's own files into the program's folder, and list the stages.

        Raises:
            UsageError: the options do not fit this program.
        """

    @abstractmethod
    def check(self, artifact: Path, spec: ProgramSpec) -> Mapping[str, Any]:
        """Compare the description inside a compiled file with the program.

        Returns:
            JSON facts for the manifest. Two have a meaning: `compiler`, the compiler's version, if it is
            known; and `notes`, sentences that the user should read, such as a part that runs on the CPU.

        Raises:
            BundleError: the file is damaged, is for another chip, or has other inputs or outputs.
        """

    def estimate(self, facts: Mapping[str, Any]) -> Estimate | None:
        """Return the estimate in the facts that `check` returned; None: there is none.

        Args:
            facts: as they are in a manifest, which anyone may have written.
        """
        return None

    def emulated(self, request: CompileRequest) -> tuple[dict[str, str], dict[str, str]]:
        """Return the emulator's files of inputs and of outputs: name -> file; empty: it does not run."""
        need, spec = self.emulation(request.spec, request.options), request.spec
        if need is None or not request.emulation:
            return {}, {}
        files = [f"{name}.npy" for name in need.outputs]
        inputs = zip((tensor.name for tensor in spec.inputs), request.emulation, strict=True)
        outputs = zip((tensor.name for tensor in spec.outputs), files, strict=True)
        return dict(inputs), dict(outputs)

    def accuracy(self, stage: str, log: str) -> Mapping[str, float]:
        """Read the accuracy that the vendor's tool wrote to the log of a stage: layer -> SNR in dB."""
        return {}

    def explain(self, failure: Failure) -> Explanation:
        """Explain a failed stage: what happened, as words that follow the compiler's title; and a hint."""
        known = {**_FAILURES, **self.failures}
        explanations = [known[name] for name in failure.classes if name in known]
        happened, hint = _FAILED_STAGES.get(failure.stage) or (explanations or [_OTHER_FAILURE])[0]
        return happened, hint.replace("{program}", failure.program).replace("{target}", self.target)

    def inputs(self, files: Sequence[str]) -> tuple[str, ...]:
        """Select the files of a program that the compiler reads: all but compiled artifacts."""
        return tuple(file for file in files if not file.endswith(self.suffix))
