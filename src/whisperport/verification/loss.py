"""What a checkpoint itself loses in a precision: how far torch in it is from torch in float32."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Precision of a program -> the precision that torch computes for its limit. 16-bit activations lose no more
# than float16 does, beside what the weights lose. torch's own 8-bit activations would say nothing: which
# tensors a compiler quantizes, and how, differs.
TORCH_PRECISIONS = {"fp16": "fp16", "w16a16": "fp16", "bf16": "bf16", "w8": "w8", "w8a16": "w8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The error of an output in one precision. Errors are absolute, divided by the output's rms."""

    sqnr_db: float  # of the whole output
    speech_sqnr_db: float  # of its first rows, up to the end of the clip
    worst_row_db: float  # lowest SQNR of a row
    rms: float  # root mean square of the output; the unit of what follows
    median: float
    p99: float
    p999: float
    largest: float

    def to_array(self) -> NDArray[np.float64]:
        """Return the fields as (8,) float64."""
        return np.array(astuple(self), np.float64)

    @classmethod
    def from_array(cls, array: NDArray[Any]) -> "Loss":
        """Read what `to_array` returned.

        Raises:
            ValueError: it has another length.
        """
        names = [field.name for field in fields(cls)]
        return cls(**dict(zip(names, map(float, array), strict=True)))

    @property
    def rms_error(self) -> float:
        """Root mean square of the error, in the output's own unit."""
        return self.rms * float(10 ** (-self.sqnr_db / 20))


def loss_of(actual: NDArray[Any], expected: NDArray[Any], speech: int | None = None) -> Loss:
    """Measure the error of (rows, columns), in float64. An output that is not finite has −infinity dB.

    Args:
        actual: the output in a lower precision.
        expected: the output in float32.
        speech: number of first rows that belong to the clip; None: all.
    """
    e = expected.astype(np.float64)
    difference = np.nan_to_num(actual.astype(np.float64) - e, nan=math.inf)
    rms = math.sqrt(float(np.mean(e**2))) or 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        noise, signal = difference**2, e**2
        rows = [_db(s, n) for s, n in zip(signal.sum(1), noise.sum(1), strict=True)]
    median, p99, p999 = np.quantile(np.abs(difference), (0.5, 0.99, 0.999), method="lower") / rms
    return Loss(
        sqnr_db=_db(signal.sum(), noise.sum()),
        speech_sqnr_db=_db(signal[:speech].sum(), noise[:speech].sum()),
        worst_row_db=min(rows),
        rms=rms,
        median=float(median),
        p99=float(p99),
        p999=float(p999),
        largest=float(np.abs(difference).max()) / rms,
    )


def worst(losses: Sequence[Loss]) -> Loss:
    """Return the loss with the lowest SQNR."""
    return min(losses, key=lambda loss: loss.sqnr_db)


def _db(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and noise < math.inf else -math.inf
