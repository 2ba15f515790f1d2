"""Copies of float32 arrays in bfloat16, for programs that compute in it and run for every token.

A program in bfloat16 whose inputs are float32 converts all of them in every run. For a step of Whisper
small these are 31 million numbers, of which a new token changes 18 thousand.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whisperport.program.program_kind import STEP
from whisperport.program.runner import Array, Part
from whisperport.program.signatures import roles
from whisperport.program.spec import ProgramSpec
from whisperport.system.memory import Memory, room

HIGH = int(sys.byteorder == "little")  # index of the half of a float32 that bfloat16 keeps


def inputs_in_bf16(spec: ProgramSpec) -> tuple[str, ...]:
    """Return the inputs of a program of which a binding keeps bfloat16 copies; empty for most programs.

    They are the keys and values of `step` and `step_B`. Other programs run only once or a few times per
    window, so that copies would save no time.
    """
    if spec.kind.name != STEP:
        return ()
    role_of = roles(spec)
    kept = [tensor for tensor in spec.inputs if role_of[tensor.name] != "input"]
    if any(tensor.dtype != "float32" for tensor in kept):
        return ()
    return tuple(tensor.name for tensor in kept)


def read_in_bf16(model: Any, names: tuple[str, ...]) -> Any:
    """Return an `openvino.Model`, changed in place, whose inputs `names` are bfloat16 and not float32."""
    from openvino import Type
    from openvino.preprocess import PrePostProcessor

    processor = PrePostProcessor(model)
    for name in names:
        processor.input(name).tensor().set_element_type(Type.bf16)
    return processor.build()


class Bf16Copy:
    """A copy of an array in bfloat16, as the bits of its numbers: numpy has no bfloat16.

    Attributes:
        tensor: an `openvino.Tensor` that reads the copy in place.
    """

    def __init__(self, array: Array, bits: NDArray[np.uint16]) -> None:
        """
        Args:
            array: float32, C-contiguous.
            bits: memory for the copy, of the array's shape, C-contiguous.
        """
        from openvino import Shape, Tensor, Type

        self._source: NDArray[np.uint32] = array.view(np.uint32)
        self._bits = bits
        self.tensor: Any = Tensor(bits, Shape(array.shape), Type.bf16)
        for head in range(len(array)):  # one at a time fits into the processor's cache
            self.update((slice(head, head + 1),))

    def update(self, part: Part) -> None:
        """Copy a part of the array again."""
        self._bits[part] = rounded(self._source[part])


def copies(arrays: Sequence[Array]) -> list[Bf16Copy]:
    """Return a copy of each array, all in one block of memory.

    For the arrays of Whisper small this takes half of the time of a block per array.
    """
    memory = Memory(sum(room(array.shape, np.uint16) for array in arrays))
    return [Bf16Copy(array, memory.array(array.shape, np.uint16)) for array in arrays]


def rounded(bits: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """Round float32 to the nearest bfloat16, and to the even one of two, as processors do.

    An infinity stays one, and a NaN stays a NaN or becomes an infinity. This excludes NaNs whose bits
    after the sign are 0x7FFF8000 or more, which no operation of a processor returns.

    Args:
        bits: of the float32 numbers.

    Returns:
        The bits of the bfloat16 numbers.
    """
    result = bits >> 16
    result &= 1  # 1 where the bfloat16 number below is odd
    result += 0x7FFF
    result += bits
    return result.view(np.uint16)[..., HIGH::2]
