"""Run quantized or compiled programs in a vendor's emulator, and compare them with the lowered programs.

samples of a program's inputs ──────── the compiler's layout ─────────► arrays
               │                                                           │
the lowered program on the CPU, in float32                 a stage of the vendor's SDK
               ▼                                                           ▼
       expected outputs ─────────────── compared with ───────────────── outputs
"""

import io
from pathlib import Path

import numpy as np

from whisperport.build.compile.source import Emulation, Source
from whisperport.program.checks import Check
from whisperport.program.runner import Array
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.system.atomic import write_atomic
from whisperport.system.npy_file import open_array
from whisperport.system.progress import begin_stage
from whisperport.targets.compiler import EmulationNeed


def prepare_emulation(
    source: Source, spec: ProgramSpec, need: EmulationNeed, folder: Path
) -> Emulation | None:
    """Write inputs of a program to its folder, and compute the expected outputs.

    Returns:
        The inputs and the expected outputs; None if there are no inputs.
    """
    begin_stage(f"{spec.name}: computing inputs for the vendor's emulator")
    examples = source.examples(spec, need.clips)
    if not examples.inputs:
        return None
    outputs = [source.run(spec, inputs) for inputs in examples.inputs]
    expected = tuple(np.stack(arrays) for arrays in zip(*outputs, strict=True))
    emulation = Emulation(spec=spec, need=need, examples=examples, expected=expected)
    for file, arrays in zip(emulation.files, zip(*examples.inputs, strict=True), strict=True):
        _write(folder / file, np.stack([need.layout(array) for array in arrays]))
    return emulation


def emulation_checks(source: Source, emulation: Emulation, folder: Path) -> tuple[Check, ...]:
    """Compare the outputs that the emulator wrote to the program's folder with the expected outputs."""
    spec = emulation.spec
    begin_stage(f"{spec.name}: comparing the outputs of the vendor's emulator")
    outputs = [
        _read(folder / f"{name}.npy", tensor, len(expected))
        for name, tensor, expected in zip(
            emulation.need.outputs, spec.outputs, emulation.expected, strict=True
        )
    ]
    return source.compared(emulation, outputs)


def _read(path: Path, tensor: TensorSpec, samples: int) -> Array | None:
    """Read an output as (samples, ...) float32; None if the file cannot be read.

    An array with another number of values keeps its shape, so that the comparison fails.
    """
    try:
        array: Array = open_array(path)
    except ValueError:  # another machine may have written a damaged file
        return None
    if array.dtype.kind != "f":
        return array
    shape = (samples, *tensor.shape)
    values: Array = array.astype(np.float32)
    return values.reshape(shape) if values.size == np.prod(shape) else values


def _write(path: Path, array: Array) -> None:
    """Write an array. Equal values give equal bytes, so that a finished stage is not repeated."""
    content = io.BytesIO()
    np.save(content, np.ascontiguousarray(array), allow_pickle=False)
    write_atomic(path, content.getvalue())
