"""The values of a file as a candidate reads them, in the order of the file, without padding."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whisperport.verification.diagnosis.buffers import Limits, Region, constant_run, limits_of
from whisperport.verification.diagnosis.candidates import Candidate
from whisperport.verification.diagnosis.reference_outputs import ReferenceOutput

Doubles = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class FileValues:
    """The values of a candidate, to be compared with one output."""

    candidate: Candidate
    reference: ReferenceOutput
    x: Doubles  # (n,) values; 0 where there is none
    exists: Mask  # (n,) whether the file is long enough and the value is finite
    not_finite: int
    tail: Region  # constant values at the end
    head: Region  # constant values at the beginning
    limits: Limits

    @property
    def written(self) -> Mask:
        """The values that are finite and no part of a constant end."""
        mask: Mask = self.exists & ~self.tail.mask & ~self.head.mask
        return mask

    @property
    def usable(self) -> Mask:
        """The values that the fit uses: those that were written and not clipped."""
        mask: Mask = self.written & ~self.limits.mask
        return mask

    def in_frames(self, values: Doubles) -> Doubles:
        """Return values in the order of the file as (F, C)."""
        return self.reference.in_frames(self.candidate.layout.restore(values))

    def in_file(self, values: Doubles) -> Doubles:
        """Return values (F, C) in the order of the file."""
        stored: Doubles = self.candidate.layout.arrange(self.reference.from_frames(values))
        return stored


def file_values(candidate: Candidate, reference: ReferenceOutput) -> FileValues:
    """Return the values of a candidate, and which of them were written."""
    values, layout = candidate.reading.values, candidate.layout
    missing = max(0, layout.size - values.size)
    picked = layout.pick(np.pad(values, (0, missing)))
    there = layout.pick(np.arange(layout.size)) < layout.size - missing
    finite = np.isfinite(picked)
    x = np.where(finite, picked, 0).astype(np.float64)
    tail, head = constant_run(x, there, at_end=True), constant_run(x, there, at_end=False)
    return FileValues(
        candidate,
        reference,
        x,
        there & finite,
        int(np.count_nonzero(there & ~finite)),
        tail,
        head,
        limits_of(x, there & finite & ~tail.mask & ~head.mask),
    )
