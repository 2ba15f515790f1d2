"""Outputs that a file may hold: the expected one, another output, or the output for a wrong input."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from whisperport.program.runner import Array
from whisperport.verification.diagnosis.causes import CauseCode, Finding
from whisperport.verification.diagnosis.expected import Alternative, ExpectedTensor
from whisperport.verification.diagnosis.layouts import squeezed

Doubles = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ReferenceOutput:
    """An output that a file may hold.

    Attributes:
        name: name of the output.
        array: its values in the shape without axes of size 1.
        frame_axis: the axis of frames in this shape; None: there is one frame.
        findings: the causes that it stands for; empty for the expected output.
        described: what it is, such as "the output `logits` of the clip".
    """

    name: str
    array: Doubles
    frame_axis: int | None
    findings: tuple[Finding, ...]
    described: str

    @classmethod
    def of(
        cls,
        tensor: ExpectedTensor,
        array: Array,
        findings: tuple[Finding, ...],
        described: str,
    ) -> "ReferenceOutput":
        """Create the reference for values of an output."""
        axis = tensor.frame_axis
        within = sum(size > 1 for size in tensor.array.shape[:axis])
        has_frames = tensor.array.shape[axis] > 1
        values = array.reshape(squeezed(tensor.array.shape)).astype(np.float64)
        return cls(tensor.name, values, within if has_frames else None, findings, described)

    @cached_property
    def frames(self) -> Doubles:
        """The values as (F, C)."""
        return self.in_frames(self.array)

    @cached_property
    def mean_square(self) -> float:
        """Mean square of the values."""
        return float(np.mean(np.square(self.array)))

    @property
    def is_window(self) -> bool:
        """Whether it is the output for another window of the clip."""
        return any(finding.cause is CauseCode.OTHER_WINDOW for finding in self.findings)

    def in_frames(self, values: Doubles) -> Doubles:
        """Return values of the output's shape as (F, C)."""
        if self.frame_axis is None:
            return values.reshape(1, -1)
        return np.moveaxis(values, self.frame_axis, 0).reshape(values.shape[self.frame_axis], -1)

    def from_frames(self, values: Doubles) -> Doubles:
        """Return values (F, C) in the output's shape."""
        if self.frame_axis is None:
            return values.reshape(self.array.shape)
        shape = self.array.shape
        other_sizes = shape[: self.frame_axis] + shape[self.frame_axis + 1 :]
        moved = values.reshape(shape[self.frame_axis], *other_sizes)
        return np.moveaxis(moved, 0, self.frame_axis)


def of_expected(tensor: ExpectedTensor) -> ReferenceOutput:
    """Return the reference for the expected output."""
    return ReferenceOutput.of(tensor, tensor.array, (), f"the output `{tensor.name}`")


def of_other_output(tensor: ExpectedTensor, expected: str) -> ReferenceOutput:
    """Return the reference for another output than the expected one."""
    finding = Finding(
        cause=CauseCode.OUTPUTS_SWAPPED,
        sentence=f"The file of `{expected}` holds the output `{tensor.name}`.",
        advice="Compare the order of the compiled model's outputs with that of the program.",
    )
    return ReferenceOutput.of(tensor, tensor.array, (finding,), f"the output `{tensor.name}`")


def of_alternative(tensor: ExpectedTensor, alternative: Alternative) -> ReferenceOutput | None:
    """Return the reference for the output of a wrong input; None if it is not known."""
    array = alternative.arrays.get(tensor.name)
    if array is None or array.size != tensor.array.size:
        return None
    finding = Finding(
        cause=alternative.cause, sentence=alternative.sentence, advice=alternative.advice
    )
    described = f"the output for another input ({alternative.sentence.rstrip('.')})"
    return ReferenceOutput.of(tensor, array, (finding,), described)
