"""Run quantized or compiled programs in a vendor's emulator, and compare them with the lowered programs.

samples of a program's inputs ──────── the compiler's layout ─────────► arrays
               │                                                           │
the lowered program on the CPU, in float32                 a stage of the vendor's SDK
               ▼                                                           ▼
       expected outputs ─────────────── compared with ───────────────── outputs
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from whisperport.program.runner import Array, Runner
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.system.array_files import open_array
from whisperport.system.atomic import write_atomic
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


def prepare_emulation(
    spec: ProgramSpec,
    need: EmulationNeed,
    folder: Path,
    examples: Examples,
    run: Callable[[Sequence[Array]], list[Array]],
) -> Emulation | None:
    """Write inputs of a program to its folder, and compute the expected outputs.

    Args:
        spec: the program.
        need: what the vendor's emulator reads and writes.
        folder: the program's work folder.
        examples: the inputs.
        run: runs the lowered program, as it was before it was quantized or compiled.

    Returns:
        The inputs and the expected outputs; None if there are no inputs.
    """
    if not examples.inputs:
        return None
    outputs = [run(inputs) for inputs in examples.inputs]
    expected = tuple(np.stack(arrays) for arrays in zip(*outputs, strict=True))
    emulation = Emulation(spec=spec, need=need, examples=examples, expected=expected)
    for file, arrays in zip(emulation.files, zip(*examples.inputs, strict=True), strict=True):
        _write(folder / file, np.stack([need.layout(array) for array in arrays]))
    return emulation


def emulator_outputs(emulation: Emulation, folder: Path) -> list[Array | None]:
    """Read the outputs that the emulator wrote to the program's folder; None: it cannot be read."""
    return [
        _read(folder / f"{name}.npy", tensor, len(expected))
        for name, tensor, expected in zip(
            emulation.need.outputs, emulation.spec.outputs, emulation.expected, strict=True
        )
    ]


def run_in_order(runner: Runner, inputs: Sequence[Array]) -> list[Array]:
    """Run a program on arrays in the order of its inputs. Returns its outputs in their order."""
    names = [tensor.name for tensor in runner.spec.inputs]
    return list(runner.run(dict(zip(names, inputs, strict=True))).values())


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
