"""What a vendor's own compiler is to whisperport: what it needs, its stages, and what it made.

The vendor's class says these things; `compiling` drives them, and `toolchain` runs the stages in the
interpreter that has the vendor's SDK.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from whisperport.dims import Dims
from whisperport.runner import Array
from whisperport.spec import ProgramSpec
from whisperport.targets.options import NoOptions
from whisperport.toolchain import Failure, Stage

Layout = Callable[[Array], Array]
"""One sample of one input, moved into the order of axes that a compiler wants; values stay as they are."""


def same_layout(array: Array) -> Array:
    """The layout of a compiler that wants its samples as the program has its inputs."""
    return array


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationNeed:
    """The samples that a compiler wants of one program's inputs."""

    samples: int
    names: tuple[str, ...]  # of each input's array, in the order of the program's inputs
    layout: Layout = same_layout
    dtype: str = "float32"
    fewer_hint: str = ""  # how to need fewer samples, as a hint: "`--option …` needs fewer"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationNeed:
    """What a vendor's emulator of quantized programs is given, and what it gives back.

    One of the stages in the plan reads the inputs and writes the outputs: `.npy` arrays of
    (samples, ...) in the program's folder. The samples come from the bundle's reference clips, never
    from the calibration set, and whisperport compares the outputs.
    """

    inputs: tuple[str, ...]  # names of arrays, in the order of the program's inputs
    outputs: tuple[str, ...]  # names of arrays, in the order of the program's outputs
    layout: Layout = same_layout  # of one sample of one input
    # simulated: the stage runs the compiled file itself, as the device would; emulated: it runs the
    # quantized program that the compiled file is made from
    kind: Literal["emulated", "simulated"] = "emulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """One program that is to be compiled."""

    spec: ProgramSpec
    dims: Dims
    options: Any  # of the compiler's own options class
    folder: (
        Path  # of the program, in the work folder; holds the lowered files and the calibration set
    )
    files: tuple[str, ...]  # the lowered files in it
    arrays: tuple[str, ...] = ()  # the calibration set in it: one `.npy` per input, (samples, ...)
    samples: int = 0
    # the inputs of the emulation in it: one `.npy` per input; empty: nothing is to be emulated
    emulation: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilePlan:
    """How one program is compiled."""

    stages: tuple[Stage, ...]
    artifact: str  # the compiled file, which one of the stages writes
    settings: Mapping[str, Any] = field(default_factory=dict)  # JSON, for the stage script
    keep: tuple[str, ...] = ()  # files of the folder that go into the bundle beside the artifact


class Compiler(ABC):
    """A vendor's compiler, described by code that needs no SDK."""

    title: str  # as errors call it, with the versions that serve the target
    toolchain: ClassVar[str]  # its name in `--toolchain NAME=PYTHON`
    sdk: ClassVar[str]  # import name of the SDK's package
    source: ClassVar[str]  # where the SDK comes from
    script: ClassVar[Path]  # the stage script; see `toolchain/driver.py` for what it defines
    options: ClassVar[type[Any]] = NoOptions  # see `options.py`
    suffix: ClassVar[str]  # of a compiled artifact: ".rknn"

    @abstractmethod
    def settings(self) -> Mapping[str, Any]:
        """JSON for every stage of every program: which chip, which versions of the SDK serve it."""

    @abstractmethod
    def calibration(self, spec: ProgramSpec, dims: Dims, options: Any) -> CalibrationNeed | None:
        """The calibration set that a program needs; None: it needs none."""

    def emulation(self, spec: ProgramSpec, options: Any) -> EmulationNeed | None:
        """What the vendor's emulator needs of a program; None: it has none, or it is not wanted."""
        return None

    @abstractmethod
    def plan(self, request: CompileRequest) -> CompilePlan:
        """Write the vendor's own files into the program's folder, and list the stages.

        Raises:
            UsageError: the options do not suit this program.
        """

    @abstractmethod
    def check(self, artifact: Path, spec: ProgramSpec) -> Mapping[str, Any]:
        """Compare a compiled file's own description with the program; JSON facts for the manifest.

        `compiler`, the version that made it, is one of the facts where the file says so.

        Raises:
            BundleError: it is damaged, for another chip, or has other inputs or outputs.
        """

    def accuracy(self, stage: str, log: str) -> Mapping[str, float]:
        """What the vendor's tool measured itself and wrote to the log of a stage: layer -> SNR in dB."""
        return {}

    def explain(self, failure: Failure) -> tuple[str, str]:
        """What happened in a stage that failed, to follow the compiler's title, and what to do next."""
        return (
            "failed",
            "finished stages are kept: the same command continues with the failed stage",
        )

    def inputs(self, files: Sequence[str]) -> tuple[str, ...]:
        """Of a bundle's files of a program, those that the compiler is given."""
        return tuple(file for file in files if not file.endswith(self.suffix))
