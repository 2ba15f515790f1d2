"""The interface of what is compiled: programs, samples of their inputs, and where the result goes.

`bundle_source.py` has the programs of a bundle, and `file_source.py` one program in a file of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from whisperport.build.calibration import CalibrationRequest, CalibrationSet
from whisperport.build.compile.artifacts import Artifact
from whisperport.program.bundle import Bundle, ProgramEntry
from whisperport.program.checks import Check
from whisperport.program.dims import Dims
from whisperport.program.runner import Array, Runner
from whisperport.program.spec import ProgramSpec
from whisperport.targets.compiler import EmulationNeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Inputs on which a compiled program is compared with the lowered one.

    Attributes:
        names: names of the clips or files that the inputs belong to.
        inputs: samples, each with its arrays in the order of the program's inputs.
        tokens: number of tokens of every sample; those after them are padding. Empty: there is none.
    """

    names: tuple[str, ...]
    inputs: Sequence[Sequence[Array]]
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """The inputs of one program's emulation, and the expected outputs.

    Attributes:
        spec: signature of the program.
        need: what the vendor's emulator reads and writes.
        examples: the inputs.
        expected: (samples, ...) for every output of the program.
    """

    spec: ProgramSpec
    need: EmulationNeed
    examples: Examples
    expected: tuple[Array, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the input files in the program's folder."""
        return tuple(f"{name}.npy" for name in self.need.inputs)

    @property
    def decides(self) -> bool:
        """Whether a program whose comparisons fail is not written.

        An emulator's results are only reported, as they are not those of the compiled file, unless its
        `EmulationNeed` says that they decide.
        """
        return self.need.kind == "simulated" or self.need.decides


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledProgram:
    """One program that a vendor's compiler compiled.

    Attributes:
        name: name of the program.
        target: name of its target.
        file: path of the compiled file in the bundle or in the output folder.
        bytes: size of the compiled file.
        compiler: version of the compiler, as the compiled file states it; "" if it states none.
        samples: number of calibration samples; 0 if the program needs none.
        snr_db: layer -> signal-to-noise ratio in dB, as the compiler measured it.
        ran: what the vendor's tool ran for the comparison: the compiled file (simulated) or the quantized
            program (emulated); "": nothing.
        emulation: the comparisons.
        notes: what the user should read, such as a part of the program that runs on the CPU.
        logs: paths of the logs of the stages.
    """

    name: str
    target: str
    file: str
    bytes: int
    compiler: str
    samples: int
    snr_db: Mapping[str, float] = field(default_factory=dict)
    ran: Literal["emulated", "simulated", ""] = ""
    emulation: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()

    @classmethod
    def of(cls, folder: Path, entry: ProgramEntry, artifact: Artifact) -> "CompiledProgram":
        """Describe a program of a folder that its compiled file was written to."""
        return cls(
            name=entry.spec.name,
            target=entry.target,
            file=entry.files[0],
            bytes=(folder / entry.files[0]).stat().st_size,
            compiler=entry.facts.compiler,
            samples=entry.facts.calibration_samples,
            snr_db=entry.facts.snr_db,
            ran=artifact.emulation if artifact.checks else "",
            emulation=artifact.checks,
            notes=entry.facts.notes,
            logs=tuple(str(path) for path in artifact.logs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The result of `compile`.

    Attributes:
        folder: folder of the bundle, or the output folder of a program from a file.
        programs: the compiled programs.
        bundle: the new bundle; None if a file was compiled.
    """

    folder: Path
    programs: tuple[CompiledProgram, ...]
    bundle: Bundle | None = None


class Source(ABC):
    """The programs to compile. Each is loaded at its first use.

    Attributes:
        path: the bundle or the file, as it is shown to the user.
        entries: its programs; those without a vendor's compiler are not compiled.
        dims: sizes of the model, as far as a compiler reads them.
        out: folder that is written.
    """

    path: Path
    entries: tuple[ProgramEntry, ...]
    dims: Dims
    out: Path

    @abstractmethod
    def check(self, *, samples: bool) -> None:
        """Check what can be checked before hours of work: the output, and the size of the model.

        Args:
            samples: whether samples of the programs' inputs are needed.

        Raises:
            BundleError, LoweringError, ProgramError, UsageError: this cannot be compiled or written.
        """

    @abstractmethod
    def quantize(self, work: Path) -> None:
        """Quantize programs whose target, and not its compiler, quantizes them.

        Args:
            work: the work folder.
        """

    @abstractmethod
    def file(self, name: str) -> Path:
        """Return the path of one of the files of an entry, as the compiler reads it."""

    @abstractmethod
    def calibrated(self, requests: Sequence[CalibrationRequest]) -> Mapping[str, CalibrationSet]:
        """Return program -> its calibration set, written to the folder of its request.

        Raises:
            AudioError: audio is missing, or there are too few samples, or none can be used.
            ProgramError: samples are missing or do not fit the program.
        """

    @abstractmethod
    def examples(self, spec: ProgramSpec, clips: int) -> Examples:
        """Return the inputs that a program is compared on.

        Args:
            spec: the program.
            clips: number of clips or files that they are made from; 0: all that the program needs.
        """

    @abstractmethod
    def run(self, spec: ProgramSpec, inputs: Sequence[Array]) -> list[Array]:
        """Run a lowered program, as it was before it was quantized or compiled, in its runtime."""

    @abstractmethod
    def compared(self, emulation: Emulation, outputs: Sequence[Array | None]) -> tuple[Check, ...]:
        """Compare a program's outputs in the vendor's emulator with the expected ones; see `Emulation`."""

    @abstractmethod
    def rejection(self, failures: Sequence[Check]) -> tuple[str, str]:
        """Return, in words, why programs are rejected, and what to do."""

    @abstractmethod
    def release(self, emulations: Sequence[Emulation]) -> None:
        """Release the memory of programs that no comparison of these emulations needs."""

    @abstractmethod
    def write(self, artifacts: Mapping[str, Artifact]) -> Compiled:
        """Write the compiled files, program -> its file, completely or not at all."""


def run_in_order(runner: Runner, inputs: Sequence[Array]) -> list[Array]:
    """Run a program on arrays in the order of its inputs. Returns its outputs in their order."""
    names = [tensor.name for tensor in runner.spec.inputs]
    return list(runner.run(dict(zip(names, inputs, strict=True))).values())
