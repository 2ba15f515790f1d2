"""Diagnose the outputs of a device: say why they differ from the expected outputs."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from whisperport.bundle import Bundle
from whisperport.diagnosis.expected import Expected
from whisperport.diagnosis.result import Diagnosis
from whisperport.progress import Progress
from whisperport.runner import Array
from whisperport.targets import RunOptions

DeviceOutput = str | os.PathLike[str] | Array
"""A file of a device, headerless little-endian or `.npy`, or an array in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnoseOptions:
    """Options of `diagnose`.

    Args:
        program: name of the program that the device ran. Default: "encoder".
        clip: name of the reference clip that the device was given. Default: "", the first clip of the
            reference.
        run: how the bundle's programs are run here, for expected outputs and for wrong inputs.
    """

    program: str = "encoder"
    clip: str = ""
    run: RunOptions = field(default_factory=RunOptions)


def diagnose(
    bundle: Bundle | Expected | str | os.PathLike[str],
    output: DeviceOutput | Mapping[str, DeviceOutput],
    options: DiagnoseOptions | None = None,
    *,
    progress: Progress = lambda _: None,
) -> Diagnosis:
    """Compare the output of a device with the expected output, and name the causes of a difference.

    Args:
        bundle: the bundle or its folder; or its expected outputs, which `expected_outputs` returns. Give
            these to diagnose many files with one computation of the expected outputs.
        output: a file or array, if the program has one output; a folder with one file per output, named
            after it (`features.bin`, `logits.npy`, ...); or output name -> file or array.
        options: program, clip and how to run; None: the defaults.
        progress: called with a line for each stage.
    """
    raise NotImplementedError(Path)
