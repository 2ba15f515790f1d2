"""The expected outputs of a program for one clip, and its outputs for wrong inputs, made when needed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

import numpy as np

from whisperport.errors import UsageError
from whisperport.program.program_kind import ENCODER, kind_of
from whisperport.program.runner import Array
from whisperport.program.strict_json import Field
from whisperport.verification.array_comparison import Comparison, Gate, compare
from whisperport.verification.diagnosis.causes import CauseCode
from whisperport.verification.loss import Loss
from whisperport.verification.tolerances import limit_of

INTEGERS = ("int8", "uint8", "int16", "uint16")

Simulations = Mapping[str, Mapping[str, Array]]
"""Recipe of an 8-bit quantization, such as "min-max per tensor" -> output name -> its value."""

Simulate = Callable[[Sequence[str]], Simulations]
"""Computes the outputs of a program in 8 bits by the recipes of these names; all for an empty list."""


def no_simulation(recipes: Sequence[str]) -> Simulations:
    """Return nothing: no simulation is available."""
    return {}


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a device stores a tensor in integers: value = (q - zero_point) * scale.

    Raises:
        UsageError: the dtype, the scale or the zero point is out of range.
    """

    dtype: str  # one of INTEGERS
    scale: float
    zero_point: Annotated[int, Field.signed]

    def __post_init__(self) -> None:
        if self.dtype not in INTEGERS:
            raise UsageError(
                f"there is no quantization to `{self.dtype}`",
                hint=f"choose one of {', '.join(INTEGERS)}",
            )
        info = np.iinfo(self.dtype)
        if not 0 < self.scale < float("inf"):
            raise UsageError(
                f"the scale of a quantization cannot be {self.scale:g}",
                hint="give a positive number",
            )
        if not info.min <= self.zero_point <= info.max:
            raise UsageError(
                f"the zero point of a quantization to {self.dtype} cannot be {self.zero_point}",
                hint=f"give an integer from {info.min} to {info.max}",
            )

    def quantize(self, values: Array) -> Array:
        """Return the integers that store `values`, rounded to nearest and clipped to the dtype's range."""
        info = np.iinfo(self.dtype)
        q = np.rint(values.astype(np.float64) / self.scale) + self.zero_point
        integers: Array = np.clip(q, info.min, info.max).astype(self.dtype)
        return integers


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedTensor:
    """One output of a program, as it should be.

    Attributes:
        name: name of the output.
        array: its expected value, float32, in the shape of the program's signature.
        frame_axis: the axis of frames or tokens; all other axes together are the channels.
        quantization: how the device stores it; None: as float32.
    """

    name: str
    array: Array
    frame_axis: int
    quantization: Quantization | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Alternative:
    """The outputs of the program for another input than the clip's.

    Attributes:
        cause: the cause that it stands for.
        sentence: what the input was, such as "The input was the clip `02.wav`."
        arrays: output name -> its value.
        advice: what to change.
        simulate: computes the same outputs as `Expected.simulate`.
    """

    cause: CauseCode
    sentence: str
    arrays: Mapping[str, Array]
    advice: str = ""
    simulate: Simulate = field(default=no_simulation, repr=False)


@dataclass(frozen=True, eq=False)
class Expected:
    """The expected outputs of one program for one clip.

    Attributes:
        program: name of the program.
        clip: name of the clip.
        tensors: every output, in the order of the program.
        source: where the outputs come from, in one sentence.
        precision: the precision whose tolerances decide whether an output passes, such as "fp16".
        make_alternatives: computes the outputs for other inputs; called once, when it is first needed.
        simulate: computes the outputs of the program in static 8 bits; nothing if that is not possible.
        sensitive: names the tensor that 8 bits suit least, in one sentence; called after `simulate`.
        known: outputs of the 8-bit program that the device runs, computed on this machine.
        losses: output name -> what torch loses of it in this precision; without it, the limit is that of
            every checkpoint.
        wrong_features: what the encoder's features are compared with besides, as `compare` does:
            what -> (T, d).
        speech: number of the encoder's first frames up to the end of the clip; None: all.
    """

    program: str
    clip: str
    tensors: tuple[ExpectedTensor, ...]
    source: str = ""
    precision: str = "fp16"
    make_alternatives: Callable[[], Sequence[Alternative]] = field(default=tuple, repr=False)
    simulate: Simulate = field(default=no_simulation, repr=False)
    sensitive: Callable[[], str] = field(default=str, repr=False)
    known: Mapping[str, Array] = field(default_factory=dict, repr=False)
    losses: Mapping[str, Loss] = field(default_factory=dict, repr=False)
    wrong_features: Mapping[str, Array] = field(default_factory=dict, repr=False)
    speech: int | None = None

    def limit(self, output: str) -> Gate:
        """Return the limit of an output: the one that `verify` has for the same program and precision."""
        encoder = kind_of(self.program).name == ENCODER
        return limit_of(self.precision, self.losses.get(output), encoder=encoder)

    def compared(self, tensor: ExpectedTensor, actual: Array) -> Comparison:
        """Compare values in the shape of an output with it.

        Features of the encoder must not be those of something else, either.
        """
        gate, expected = self.limit(tensor.name), tensor.array
        if self.program == ENCODER and expected.ndim == 3 and len(expected) == 1:
            own, speech = (actual[0], expected[0]), self.speech
            return compare(
                tensor.name,
                *own,
                gate,
                frame_axis=0,
                speech=speech,
                wrong_references=self.wrong_features,
            )
        return compare(tensor.name, actual, expected, gate)

    @cached_property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The outputs for other inputs: other clips, other windows, wrong spectrograms."""
        return tuple(self.make_alternatives())

    def tensor(self, name: str) -> ExpectedTensor:
        """Return the output called `name`.

        Raises:
            UsageError: the program has no such output.
        """
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise UsageError(
            f"the program `{self.program}` has no output `{name}`",
            hint=f"its outputs are {', '.join(tensor.name for tensor in self.tensors)}",
        )
