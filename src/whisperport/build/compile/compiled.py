"""The result of `compile`: the compiled programs, and the folder that was written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from whisperport.build.compile.artifacts import Artifact
from whisperport.program.bundle import Bundle, ProgramEntry
from whisperport.program.checks import Check


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
