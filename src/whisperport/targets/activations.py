"""Statistics of an activation over samples: whether 8 bits can hold it, and where its extreme values are.

A few channels of a Whisper encoder reach hundreds of times the values of all others, mostly in a few frames
("massive activations"). One scale for the tensor then has steps that are larger than typical values. The
largest error and the SQNR of the whole tensor do not show it, since the same few values are most of the
tensor's power. What counts is the noise of one step beside typical values: the root mean square of the
median frame, or of the median channel if that is smaller. Measured on two checkpoints with such a channel:
-4 and -6 dB for the output of the one linear that ruins the encoder in 8 bits, 12 to 16 dB for softmax's
probabilities, which ruin it too, and 24 dB and more for the outputs of all other linears.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLES = 4  # in which activations are examined: massive ones are in every clip
MIN_SQNR_DB = 20.0  # of typical values: the noise of a step is a tenth of them
MASSIVE = (
    10.0  # a channel is massive if it reaches this many times the median channel's largest value
)
PART = 2**22  # bytes of values that are copied together
EXTREME = 0.25  # a frame is extreme if it has a value of at least this part of the largest one


@dataclass(slots=True)
class Activation:
    """One activation; `add` takes its values in one sample after the other.

    Attributes:
        name: of the activation.
        low: smallest value, at most 0.
        high: largest value, at least 0.
        shape: of its values in one sample.
    """

    name: str
    low: float = 0.0
    high: float = 0.0
    shape: tuple[int, ...] = ()
    _frames: list[NDArray[np.float64]] = field(default_factory=list)
    _channels: NDArray[np.float64] | None = None
    _powers: list[NDArray[np.float64]] = field(default_factory=list)
    _extremes: list[NDArray[np.float64]] = field(default_factory=list)

    def add(self, values: NDArray[Any]) -> None:
        """Add the values in one sample: (..., channels), one frame after the other."""
        rows = values.reshape(-1, values.shape[-1])
        self.shape = values.shape
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))
        powers = np.zeros(rows.shape[1])
        for part in np.array_split(
            rows, -(-rows.nbytes // PART)
        ):  # copies of all would take more memory
            squares = np.square(part, dtype=np.float64)
            self._frames.append(np.sqrt(np.mean(squares, axis=1)))
            powers += squares.sum(axis=0)
        self._powers.append(powers / len(rows))
        self._extremes.append(_magnitudes(rows, axis=1))
        largest = _magnitudes(rows, axis=0)
        self._channels = largest if self._channels is None else np.maximum(self._channels, largest)

    @property
    def typical(self) -> float:
        """Root mean square of the median frame, or of the median channel if that is smaller."""
        channels = np.sqrt(np.mean(self._powers, axis=0))
        return float(min(np.median(np.concatenate(self._frames)), np.median(channels)))

    @property
    def channel_peaks(self) -> NDArray[Any]:
        """Largest absolute value of each channel: (channels,)."""
        assert self._channels is not None
        return self._channels

    @property
    def frame_peaks(self) -> NDArray[Any]:
        """Largest absolute value of each frame, in any sample: (frames,)."""
        return np.asarray(np.max(self._extremes, axis=0))

    @property
    def massive_channel(self) -> int | None:
        """Channel that reaches `MASSIVE` times the median channel's largest value; None: none does."""
        peaks = self.channel_peaks
        is_massive = peaks.max() > 0 and peaks.max() >= MASSIVE * np.median(peaks)
        return int(peaks.argmax()) if is_massive else None

    def step(self, bits: int = 8) -> float:
        """Size of a step of one scale that holds all values."""
        return (self.high - self.low) / float(2**bits - 1)

    def sqnr_db(self, bits: int = 8) -> float:
        """SQNR in dB of typical values if one scale holds all values."""
        step = self.step(bits)
        if not step or not self.typical:  # zeros are exact in any scale
            return math.inf
        return 20 * math.log10(self.typical * math.sqrt(12) / step)

    def __str__(self) -> str:
        """Say in words how far the extreme values are from the others, and where they are."""
        largest, median = float(self.channel_peaks.max()), float(np.median(self.channel_peaks))
        value = self.low if -self.low >= self.high else self.high
        lost = f"with one 8-bit scale, typical values keep {self.sqnr_db():.0f} dB"
        if self.massive_channel is None:
            values = f"values reach {value:.3g}, and typical values are {self.typical:.2g}"
            return f"{self.name}: {values}; {lost}"
        extreme = np.concatenate(self._extremes) >= EXTREME * largest
        ratio = f", {_times(largest / median)} the median channel's largest" if median else ""
        return (
            f"{self.name}: channel {self.massive_channel} reaches {value:.4g}{ratio}, in "
            f"{int(extreme.sum())} of {extreme.size} frames; {lost}"
        )


def _magnitudes(rows: NDArray[Any], axis: int) -> NDArray[np.float64]:
    """Return the largest absolute values along an axis."""
    return np.asarray(np.maximum(rows.max(axis), -rows.min(axis)), np.float64)


def _times(ratio: float) -> str:
    return f"{ratio:.0f} times" if ratio < 1e6 else "more than a million times"
