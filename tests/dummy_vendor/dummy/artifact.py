"""Read a compiled file: one line of JSON that describes the program, followed by the program."""

import json
from dataclasses import dataclass
from pathlib import Path

from whisperport.errors import BundleError
from whisperport.program.spec import ProgramSpec

SUFFIX = ".dmy"


@dataclass(frozen=True, slots=True)
class Artifact:
    """The description in a compiled file, and the program for the device."""

    chip: str
    compiler: str  # version of the compiler
    inputs: list[list[int]]  # shapes
    outputs: list[list[int]]  # shapes
    program: bytes


def read_artifact(path: Path) -> Artifact:
    """Read a compiled file.

    Raises:
        BundleError: the file is missing, is damaged, or has another format.
    """
    try:
        header, _, program = path.read_bytes().partition(b"\n")
        description = json.loads(header)
        return Artifact(**description, program=program)
    except (OSError, ValueError, TypeError) as error:
        raise BundleError(
            f"{path.name} is not a compiled file of this vendor",
            why=str(error),
            hint=f"give the {SUFFIX} file that the compiler wrote",
        ) from error


def check_artifact(path: Path, chip: str, spec: ProgramSpec) -> Artifact:
    """Read a compiled file, and compare it with the chip and the program.

    Raises:
        BundleError: the file is for another chip, or has other inputs or outputs.
    """
    artifact = read_artifact(path)
    if artifact.chip != chip:
        raise BundleError(
            f"{path.name} is for another chip than `{chip}`",
            why=f"it was compiled for {artifact.chip}",
            hint="export and compile for your chip",
        )
    expected = [[list(tensor.shape) for tensor in side] for side in (spec.inputs, spec.outputs)]
    if [artifact.inputs, artifact.outputs] != expected:
        raise BundleError(
            f"{path.name} does not compute `{spec.name}`",
            why=f"its inputs are {artifact.inputs} and its outputs {artifact.outputs}; expected "
            f"{expected[0]} and {expected[1]}",
            hint="compile this bundle with `whisperport compile`",
        )
    return artifact
