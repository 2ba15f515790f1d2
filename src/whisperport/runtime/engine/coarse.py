"""Exact decoding with a vocabulary projection of 8 bits.

The program `coarse_projection` returns a logit of each token and a bound on its error. The tokens whose
logit may be one of the largest are computed in float32 from the token embedding. All others stay as they
are, and are smaller than a known number, the floor. If the best token after the rules reaches the floor,
it is the one that float32 would choose; if not, all logits are computed in float32.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whisperport.program.program_kind import COARSE_PROJECTION
from whisperport.program.runner import Array, Runner
from whisperport.runtime.engine.finite import check_outputs
from whisperport.runtime.engine.scores import FORK_MARGIN, Bonus, Floats

BLOCKS, WINNERS = 512, 64  # blocks of tokens, and how many blocks have a token in float32
MOST = 4096  # tokens in float32; if more may win, all are computed
TOLERANCE = 1e-4  # of the natural logarithm of a probability
DEVIATIONS = 5  # standard deviations of a sum of rounding errors


@dataclass(frozen=True, slots=True, eq=False)
class CoarseLogits:
    """Logits of which only the largest are exact.

    Attributes:
        logits: (V,), which the caller may change.
        floor: the largest of the allowed logits is exact if it is at least this.
        sum_error: of the sum of all exp(logit).
        complete: returns all logits (V,) in float32.
    """

    logits: Floats
    floor: float
    sum_error: "SumError"
    complete: Callable[[], Floats]

    def decides(self, margin: float, bonus: Bonus | None = None) -> bool:
        """Return whether the best of the remaining tokens is the one that float32 would choose.

        Logarithms of probabilities are then right within `TOLERANCE`.

        Args:
            margin: of the closest comparison of probabilities that the rules made, in nats.
            bonus: what the choice of a token adds to its logit. All that are tried must be exact.
                One that is not stays below the floor and the largest value.
        """
        top = float(self.logits[self.logits.argmax()])  # twice as fast as `max`
        is_exact = top >= self.floor
        if bonus is not None and bonus.values.size:
            best = max(top, float((self.logits[bonus.tokens] + bonus.values).max()))
            is_exact &= best - FORK_MARGIN >= self.floor + float(bonus.values.max())
        return margin > 2 * TOLERANCE and is_exact and self.sum_error.fits(self.logits, top)


@dataclass(frozen=True, slots=True, eq=False)
class SumError:
    """The error of the sum of all exp(logit).

    A logit's error is a sum of d rounding errors. If these have no relation to the hidden state, its
    standard deviation is the bound divided by √d.

    Attributes:
        deviation: standard deviation of a logit's error; 0 if all logits are exact.
        exact: indices of the exact logits.
        highest: (n,) no other logit of a block of tokens is above this.
        size: tokens in a block.
    """

    deviation: float
    exact: NDArray[np.int64]
    highest: Floats
    size: int

    def fits(self, logits: Floats, top: float) -> bool:
        """Return whether it is at most `TOLERANCE`, relative to exp(top).

        Most often, the highest logit of each block shows it. This takes a tenth of the time.

        Args:
            logits: (V,), no exact one of which has been raised.
            top: their maximum.
        """
        if not self.deviation or self._of(np.exp(self.highest - np.float32(top)), self.size):
            return True
        weights = np.exp(logits - np.float32(top))
        weights[self.exact] = 0
        return self._of(weights, 1)

    def _of(self, weights: Floats, count: int) -> bool:
        """Return whether the error fits for weights exp(logit - top) of `count` tokens each."""
        linear = DEVIATIONS * self.deviation * math.sqrt(count * float(weights @ weights))
        return linear + self.deviation**2 / 2 * count * float(weights.sum()) <= TOLERANCE


class CoarseProjection:
    """Computes `CoarseLogits` of hidden states with the program `coarse_projection`."""

    def __init__(self, runner: Runner, embedding: Array, full: Callable[[Floats], Floats]) -> None:
        """
        Args:
            runner: of the program.
            embedding: token embedding, (V, d) float32 or float16.
            full: multiplies hidden states (R, d) by the embedding in float32: logits (R, V).
        """
        self._runner, self._embedding, self._full = runner, embedding, full
        vocabulary, self._width = embedding.shape
        self._size = math.ceil(vocabulary / BLOCKS)
        self._starts = np.arange(0, vocabulary, self._size)

    def __call__(self, hidden: Floats) -> CoarseLogits:
        """Return the logits of a hidden state (d,).

        Raises:
            NumericalError: the program returned a NaN or an infinity.
        """

        def complete() -> Floats:
            logits: Floats = self._full(hidden[None])[0]
            return logits

        outputs = self._runner.run({"hidden": hidden[None, None]})
        logits, bound = _row(outputs)
        highest = logits + bound
        if not np.isfinite(highest).all():
            check_outputs(COARSE_PROJECTION, outputs)
            return _all_exact(complete)  # the sum is beyond float32
        peaks = np.maximum.reduceat(highest, self._starts)
        floor = _floor(peaks)
        candidates = np.flatnonzero(highest >= floor)
        if len(candidates) > MOST:
            return _all_exact(complete)
        exact = self._embedding[candidates].astype(np.float32, copy=False) @ hidden
        if (np.abs(exact - logits[candidates]) > bound[candidates]).any():
            return _all_exact(complete)  # this runtime is less precise than the bound says
        logits[candidates] = exact
        deviation = float(bound.max()) / math.sqrt(self._width)
        error = SumError(deviation, candidates, np.minimum(peaks, floor), self._size)
        return CoarseLogits(logits, float(floor), error, complete)

    def bounded(self, hidden: Floats) -> tuple[Floats, Floats]:
        """Return logits (V,) of a hidden state (d,), and bounds (V,) on their errors.

        Raises:
            NumericalError: the program returned a NaN or an infinity.
        """
        outputs = self._runner.run({"hidden": hidden[None, None]})
        check_outputs(COARSE_PROJECTION, outputs)
        return _row(outputs)


def _row(outputs: Mapping[str, Array]) -> tuple[Floats, Floats]:
    """Return logits (V,) and bounds (V,)."""
    return outputs["logits"][0, 0], outputs["bound"][0, 0]


def _floor(peaks: Floats) -> np.float32:
    """Return a number that the highest possible logits of at least `WINNERS` tokens reach.

    Args:
        peaks: the highest possible logit of each block.
    """
    count = min(WINNERS, len(peaks))
    return np.float32(np.partition(peaks, -count)[-count])


def _all_exact(complete: Callable[[], Floats]) -> CoarseLogits:
    nothing = np.empty(0, np.int64), np.empty(0, np.float32)
    return CoarseLogits(complete(), -math.inf, SumError(0.0, *nothing, 1), complete)
