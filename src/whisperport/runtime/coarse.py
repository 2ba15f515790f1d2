"""Exact decoding with a vocabulary projection of 8 bits.

The program `coarse_projection` returns a logit of each token and a bound on its error. The tokens whose
logit may be one of the largest are computed in float32 from the token embedding. All others stay as they
are, and are smaller than a known number, the floor. If the best token after the rules reaches the floor,
it is the one that float32 would choose; if not, all logits are computed in float32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whisperport.checks import COARSE_PROJECTION
from whisperport.runner import Array, Runner
from whisperport.runtime.cache import Floats
from whisperport.runtime.finite import check_outputs

BLOCKS, WINNERS = 512, 64  # blocks of tokens, and how many blocks have a token in float32
MOST = 4096  # tokens in float32; if more may win, all are computed
TOLERANCE = 1e-4  # of the natural logarithm of a probability
DEVIATIONS = 5  # standard deviations of a sum of rounding errors


@dataclass(frozen=True, slots=True)
class CoarseLogits:
    """Logits of which only the largest are exact.

    Attributes:
        logits: (V,), which the caller may change.
        floor: if the largest of the allowed logits is at least this, then it is exact, and logarithms of
            probabilities are right within `TOLERANCE`.
        complete: returns all logits (V,) in float32.
    """

    logits: Floats
    floor: float
    complete: Callable[[], Floats]

    def decides(self, margin: float) -> bool:
        """Return whether the largest of the remaining logits is the one that float32 would choose.

        Args:
            margin: of the closest comparison of probabilities that the rules made, in nats.
        """
        return bool(self.logits.max() >= self.floor) and margin > 2 * TOLERANCE


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
        size = math.ceil(vocabulary / BLOCKS)
        self._starts = np.arange(0, vocabulary, size)

    def __call__(self, hidden: Floats) -> CoarseLogits:
        """Return the logits of a hidden state (d,).

        Raises:
            NumericalError: the program returned a NaN or an infinity.
        """
        logits, bound = self.bounded(hidden)
        highest = logits + bound
        floor = self._floor(highest)
        likely = np.flatnonzero(highest >= floor)

        def complete() -> Floats:
            logits: Floats = self._full(hidden[None])[0]
            return logits

        if len(likely) > MOST:
            return _all_exact(complete)
        exact = self._embedding[likely].astype(np.float32, copy=False) @ hidden
        if (np.abs(exact - logits[likely]) > bound[likely]).any():
            return _all_exact(complete)  # this runtime is less precise than the bound says
        logits[likely] = exact
        error = self._error(logits, bound, likely)
        return CoarseLogits(logits, max(float(floor), error - math.log(TOLERANCE)), complete)

    def bounded(self, hidden: Floats) -> tuple[Floats, Floats]:
        """Return logits (V,) of a hidden state (d,), and bounds (V,) on their errors.

        Raises:
            NumericalError: the program returned a NaN or an infinity.
        """
        outputs = self._runner.run({"hidden": hidden[None, None]})
        check_outputs(COARSE_PROJECTION, outputs)
        return outputs["logits"][0, 0], outputs["bound"][0, 0]

    def _floor(self, highest: Floats) -> np.float32:
        """Return a number that the highest possible logits of at least `WINNERS` tokens reach."""
        peaks = np.maximum.reduceat(highest, self._starts)
        count = min(WINNERS, len(peaks))
        return np.float32(np.partition(peaks, -count)[-count])

    def _error(self, logits: Floats, bound: Floats, exact: NDArray[np.int64]) -> float:
        """Return the logarithm of the error of the sum of all exp(logit).

        A logit's error is a sum of d rounding errors. If these have no relation to the hidden state, its
        standard deviation is the bound divided by √d.
        """
        peak = float(logits.max())
        weights = np.exp(logits - np.float32(peak))
        weights[exact] = 0
        deviation = float(bound.max()) / math.sqrt(self._width)
        linear = DEVIATIONS * deviation * float(np.sqrt(weights @ weights))
        error = linear + deviation**2 / 2 * float(weights.sum())
        return peak + math.log(error) if error > 0 else -math.inf


def _all_exact(complete: Callable[[], Floats]) -> CoarseLogits:
    return CoarseLogits(complete(), -math.inf, complete)
