"""What a file may hold, and what explains its difference from the expected output."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whisperport.diagnosis.layouts import Layout
from whisperport.diagnosis.readings import Reading
from whisperport.diagnosis.reference_outputs import ReferenceOutput
from whisperport.diagnosis.result import Finding

Doubles = NDArray[np.float64]

ROUNDING_FACTOR = 3.0  # an error up to this multiple of the rounding's mean square is rounding


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """What a file may hold: a reading of its bytes, a layout, and an output."""

    reading: Reading
    layout: Layout
    reference: ReferenceOutput
    findings: tuple[Finding, ...] = ()  # causes of the file's size
    code: tuple[str, ...] = ()  # lines that cut the file


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """A hypothesis with everything that was fitted.

    Attributes:
        hypothesis: the hypothesis.
        findings: all causes, in the order in which they are undone.
        code: lines of numpy that undo them.
        error: mean square error divided by the reference's mean square, over the values that exist.
        floor: the part of it that rounding explains.
        cost_db: the error in dB plus the price of the causes.
        corrected: the values with all corrections, in the shape of the output; NaN where none exists.
        has_unknown_part: whether a part of the file belongs to no output that it was compared with.
    """

    hypothesis: Hypothesis
    findings: tuple[Finding, ...]
    code: tuple[str, ...]
    error: float
    floor: float
    cost_db: float
    corrected: Doubles
    has_unknown_part: bool = False

    @property
    def sqnr_db(self) -> float:
        """The signal-to-error ratio after all corrections, in dB."""
        return -10 * math.log10(max(self.error, 1e-30))

    def is_complete(self, tolerance: float) -> bool:
        """Whether the rest of the error is rounding, or at most `tolerance` of the mean square."""
        return self.error <= max(ROUNDING_FACTOR * self.floor, tolerance)
