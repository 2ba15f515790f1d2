"""Read a compiled file: one line of JSON that describes the program, followed by the program."""

import json
from dataclasses import dataclass
from pathlib import Path

from whisperport.program.spec import ProgramSpec
from whisperport.targets.compiled_file import expect_signature, not_compiled, other_chip

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
        raise not_compiled(path, str(error)) from error


def check_artifact(path: Path, chip: str, spec: ProgramSpec) -> Artifact:
    """Read a compiled file, and compare it with the chip and the program.

    Raises:
        BundleError: the file is for another chip, or has other inputs or outputs.
    """
    artifact = read_artifact(path)
    if artifact.chip != chip:
        raise other_chip(path, chip, f"it was compiled for {artifact.chip}")
    inputs, outputs = list(map(str, artifact.inputs)), list(map(str, artifact.outputs))
    expect_signature(path, spec, inputs, outputs, lambda tensor: str(list(tensor.shape)))
    return artifact
