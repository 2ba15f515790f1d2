"""Statistics of an activation over samples: whether 8 bits can hold it, and where its extreme values are.

A few channels of a Whisper encoder reach hundreds of times the values of all others, in a few frames
("massive activations"). One scale for the tensor then has steps that are larger than a typical frame. The
largest error and the SQNR of the whole tensor do not show it, since the same few values are most of the
tensor's power. What counts is the noise of one step beside a typical frame. Measured on two checkpoints
with such a channel: -1 and -6 dB for the output of the one linear that ruins the encoder in 8 bits, 12 to
16 dB for softmax's probabilities, which ruin it too, and 27 dB and more for all other activations.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_SQNR_DB = 20.0  # of a typical frame: the noise of a step is a tenth of its values
MASSIVE = (
    10.0  # a channel is massive if it reaches this many times the median channel's largest value
)
EXTREME = 0.25  # a frame is extreme if it has a value of at least this part of the largest one


@dataclass(slots=True)
class Activation:
    """One activation; `add` takes its values in one sample after the other.

    Attributes:
        name: of the activation.
        low: smallest value, at most 0.
        high: largest value, at least 0.
    """

    name: str
    low: float = 0.0
    high: float = 0.0
    _frames: list[NDArray[np.float64]] = field(default_factory=list)
    _channels: NDArray[np.float64] | None = None
    _extremes: list[NDArray[np.float64]] = field(default_factory=list)

    def add(self, values: NDArray[Any]) -> None:
        """Add the values in one sample: (..., channels), one frame after the other."""
        rows = np.abs(values.reshape(-1, values.shape[-1])).astype(np.float64)
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))
        self._frames.append(np.sqrt(np.mean(rows**2, axis=1)))
        self._extremes.append(rows.max(axis=1))
        largest = rows.max(axis=0)
        self._channels = largest if self._channels is None else np.maximum(self._channels, largest)

    @property
    def typical(self) -> float:
        """Root mean square of the median frame."""
        return float(np.median(np.concatenate(self._frames)))

    def sqnr_db(self, bits: int = 8) -> float:
        """SQNR in dB of a typical frame if one scale holds all values."""
        step = (self.high - self.low) / (2**bits - 1)
        if not step or not self.typical:  # zeros are exact in any scale
            return math.inf
        return 20 * math.log10(self.typical * math.sqrt(12) / step)

    def __str__(self) -> str:
        """Say in words how far the extreme values are from the others, and where they are."""
        assert self._channels is not None
        largest, median = float(self._channels.max()), float(np.median(self._channels))
        value = self.low if -self.low >= self.high else self.high
        lost = f"with one 8-bit scale a typical frame has {self.sqnr_db():.0f} dB"
        if largest < MASSIVE * median:
            return (
                f"{self.name}: values reach {value:.3g}, and the root mean square of a typical frame is "
                f"{self.typical:.2g}; {lost}"
            )
        extreme = np.concatenate(self._extremes) >= EXTREME * largest
        ratio = f", {largest / median:.0f} times the median channel's largest" if median else ""
        return (
            f"{self.name}: channel {int(self._channels.argmax())} reaches {value:.4g}{ratio}, in "
            f"{int(extreme.sum())} of {extreme.size} frames; {lost}"
        )
