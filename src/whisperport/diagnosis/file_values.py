"""The values of a file as a hypothesis reads them, in the order of the file, without padding."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whisperport.diagnosis.buffers import Region, constant_run
from whisperport.diagnosis.explanation import Hypothesis
from whisperport.diagnosis.saturation import Limits, limits_of

Doubles = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class FileValues:
    """The values of a hypothesis in the order of the file."""

    hypothesis: Hypothesis
    x: Doubles  # (n,) values; 0 where there is none
    exists: Mask  # (n,) whether the file is long enough and the value is finite
    not_finite: int
    missing: int
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
        return self.hypothesis.reference.in_frames(self.hypothesis.layout.restore(values))

    def in_file(self, values: Doubles) -> Doubles:
        """Return values (F, C) in the order of the file."""
        reference = self.hypothesis.reference
        stored: Doubles = self.hypothesis.layout.arrange(reference.from_frames(values))
        return stored


def file_values(hypothesis: Hypothesis) -> FileValues:
    values, layout = hypothesis.reading.values, hypothesis.layout
    missing = max(0, layout.size - values.size)
    if missing:
        values = np.concatenate([values, np.full(missing, np.nan, np.float32)])
    picked = layout.pick(values)
    positions = layout.pick(np.arange(layout.size)) if missing else None
    there = np.ones(picked.size, bool) if positions is None else positions < layout.size - missing
    finite = np.isfinite(picked)
    x = np.where(finite, picked, 0).astype(np.float64)
    exists = there & finite
    tail, head = constant_run(x, there, at_end=True), constant_run(x, there, at_end=False)
    limits = limits_of(x, exists & ~tail.mask & ~head.mask)
    return FileValues(
        hypothesis,
        x,
        exists,
        int(np.count_nonzero(there & ~finite)),
        int(np.count_nonzero(~there)),
        tail,
        head,
        limits,
    )
