"""Read a compiled file: a line of JSON that describes the program, then the program."""

import json
from dataclasses import dataclass
from pathlib import Path

from whisperport.errors import BundleError
from whisperport.spec import ProgramSpec

SUFFIX = ".dmy"


@dataclass(frozen=True, slots=True)
class Artifact:
    """What a compiled file says of itself, and the program for the device."""

    chip: str
    compiler: str  # its version
    inputs: list[list[int]]
    outputs: list[list[int]]
    program: bytes


def read_artifact(path: Path) -> Artifact:
    """Raises BundleError if the file is missing, damaged, or of another format."""
    try:
        header, _, program = path.read_bytes().partition(b"\n")
        told = json.loads(header)
        return Artifact(**told, program=program)
    except (OSError, ValueError, TypeError) as error:
        raise BundleError(
            f"{path.name} is no compiled file of this vendor",
            why=str(error),
            hint=f"give the {SUFFIX} file that the compiler wrote",
        ) from error


def check_artifact(path: Path, chip: str, spec: ProgramSpec) -> Artifact:
    """Raises BundleError if the file is for another chip, or has other inputs or outputs."""
    artifact = read_artifact(path)
    if artifact.chip != chip:
        raise BundleError(
            f"{path.name} is for another chip than `{chip}`",
            why=f"it was compiled for {artifact.chip}",
            hint="export and compile for the chip that you have",
        )
    expected = [[list(tensor.shape) for tensor in side] for side in (spec.inputs, spec.outputs)]
    if [artifact.inputs, artifact.outputs] != expected:
        raise BundleError(
            f"{path.name} does not compute `{spec.name}`",
            why=f"its inputs and outputs are {artifact.inputs} and {artifact.outputs}",
            hint="compile it from this bundle",
        )
    return artifact
