"""The logits after a token, and the logarithm of the sum of their exponentials for probabilities."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from whisperport.runtime.engine.finite import check_output

Floats = NDArray[np.float32]

# The sum of 100,000 exponentials of at most this number is finite in float32, and that of one number of at
# least minus this number is far above the smallest float32.
SAFE_PEAK = 60
# 64 kB. After a step, a new array for a whole row would not be in a cache of the CPU: in pieces, the sum
# of 51,865 exponentials takes 0.7 of the time.
PIECE = 16384
MOST_FORBIDDEN = 4096  # if more tokens are forbidden, the exponentials of the others are added up
# Of the sum of all exponentials. If a smaller part remains, its exponentials are added up: a subtraction
# multiplies the relative error of the sum by up to 20 here, and by more then.
LEAST_PART = 0.05
FORK_MARGIN = 4.0  # nats by which a text inside a phrase may be below the best one


@dataclass(frozen=True, slots=True, eq=False)
class Bonus:
    """What the choice of a token adds to its log-probability, beside what the model says; see `Phrases`.

    Attributes:
        tokens: (n,) ids that have a bonus, each once, in rising order.
        values: (n,) float32, nats that each of them gets more than all other tokens.
        opens: (n,) whether a phrase, or a longer one, may become complete behind each of them.
        pending: (n,) float32, nats that are given back behind each of them if its phrase does not go on.
        held: nats that all tokens lose: the pending bonus of the last token.
    """

    tokens: NDArray[np.int64]
    values: Floats
    opens: NDArray[np.bool_]
    pending: Floats
    held: float

    def raised(self, logits: Floats) -> Floats:
        """Return the logits (V,) with the bonuses, in a new array."""
        raised = logits - np.float32(self.held)
        raised[self.tokens] += self.values
        return raised

    def of(self, token: int) -> tuple[float, float, bool]:
        """Return what a token gets, what of all bonuses is pending behind it, in nats, and `opens`."""
        at = int(np.searchsorted(self.tokens, token))
        if at == self.tokens.size or self.tokens[at] != token:
            return -self.held, 0.0, False
        return self.values.item(at) - self.held, self.pending.item(at), self.opens.item(at)


@dataclass(frozen=True, slots=True, eq=False)
class FreeChoice:
    """What the model would choose without a grammar.

    Attributes:
        token: id of the most probable token.
        logprob: its natural log-probability.
        best: its logit, or if it is a timestamp, that of all timestamps together.
        times: logit of all timestamps together.
        begin: id of the first timestamp.
    """

    token: int
    logprob: float
    best: float
    times: float
    begin: int

    def gap(self, token: int, logit: float) -> float:
        """Return by how much the model would rather choose something else than a token, in nats."""
        return self.best - (self.times if token >= self.begin else logit)


class LogSum:
    """The natural logarithm of a sum of exponentials, computed when it is needed.

    This object does not refer to the logits, which the next step may overwrite. Between steps, the
    computation takes five times as long as after the last one, because a step leaves nothing but weights
    in the caches of the CPU.
    """

    def __init__(self, total: float, forbidden: Sequence[Floats] = ()) -> None:
        """
        Args:
            total: logarithm of the sum of all exponentials.
            forbidden: logits whose exponentials are subtracted from the sum.
        """
        self._total, self._forbidden = total, tuple(forbidden)

    @property
    def value(self) -> float:
        """The logarithm."""
        if not self._forbidden:
            return self._total
        part = min(self.forbidden_part, 1 - LEAST_PART)  # more only if `total` is wrong
        return self._total + math.log1p(-part)

    @cached_property
    def forbidden_part(self) -> float:
        """What the forbidden tokens have of the sum of all exponentials."""
        if not self._forbidden:
            return 0.0
        shares = np.concatenate(self._forbidden) - np.float32(self._total)
        np.exp(np.minimum(shares, 0, out=shares), out=shares)
        return float(shares.sum())


class Scores:
    """The logits after a token, which the rules change.

    Where a program returns the logarithm of the sum of all exp(logit), the exponentials of the tokens that
    the rules forbid are subtracted from that sum. Otherwise the sum is computed when it is needed.

    Attributes:
        logits: (V,), which the caller may change after `forget_sum`.
        total: natural logarithm of the sum of the exponentials that the program returned; None: unknown.
        bonus: what the choice of a token adds to its logit. Probabilities do not contain it.
        free: the model's own choice, where a grammar decides; None: it does not.
    """

    __slots__ = ("_forbidden", "_log_sum", "_n_forbidden", "bonus", "free", "logits", "total")

    def __init__(self, logits: Floats, total: float | None = None) -> None:
        """
        Args:
            logits: (V,) float32.
            total: natural logarithm of the sum of their exponentials; None: unknown.
        """
        self.logits = logits
        self.total = total
        self.bonus: Bonus | None = None
        self.free: FreeChoice | None = None
        self._forbidden: list[Floats] = []  # logits of tokens that were forbidden
        self._n_forbidden = 0
        self._log_sum: LogSum | None = None

    def copy(self) -> "Scores":
        """Return the same scores with logits of their own."""
        copy = Scores(self.logits.copy(), self.total)
        copy.bonus, copy.free = self.bonus, self.free
        copy._forbidden, copy._n_forbidden = self._forbidden.copy(), self._n_forbidden
        return copy

    def preferred(self, count: int, least: float = -np.inf) -> list[int]:
        """Return the best tokens that have a bonus, at most `count`, with raised logits above `least`."""
        bonus = self.bonus
        if bonus is None or not bonus.values.size:
            return []
        raised = self.logits[bonus.tokens] + bonus.values
        hopeful = np.flatnonzero(raised > least)
        order = hopeful[np.argsort(-raised[hopeful], kind="stable")[:count]]
        return [bonus.tokens.item(i) for i in order]

    def raised(self) -> Floats:
        """Return the logits (V,), bonuses included, which the caller must not change."""
        return self.logits if self.bonus is None else self.bonus.raised(self.logits)

    def bonus_of(self, token: int) -> tuple[float, float, bool]:
        """Return what `Bonus.of` returns; without phrases, there is nothing to get."""
        return (0.0, 0.0, False) if self.bonus is None else self.bonus.of(token)

    def forbid(self, tokens: slice | NDArray[np.int64]) -> None:
        """Set the logits of tokens that must not follow to -inf.

        Args:
            tokens: ids, each at most once.
        """
        if self.total is not None:
            forbidden = self.logits[tokens]
            self._n_forbidden += forbidden.size
            if self._n_forbidden > MOST_FORBIDDEN:
                self.forget_sum()
            else:  # a slice is a view
                self._forbidden.append(forbidden.copy() if isinstance(tokens, slice) else forbidden)
        self.logits[tokens] = -np.inf
        self._log_sum = None

    def forbid_all_but(self, tokens: slice, total: float) -> None:
        """Set the logits of all tokens but these to -inf.

        Args:
            tokens: that may follow.
            total: logarithm of the sum of exp(logit) of these.
        """
        self.logits[: tokens.start] = -np.inf
        self.logits[tokens.stop :] = -np.inf
        self.total, self._forbidden, self._n_forbidden = total, [], 0
        self._log_sum = None

    def forget_sum(self) -> None:
        """Forget the known sum, because the caller changes logits."""
        self.total, self._forbidden = None, []
        self._log_sum = None

    def log_sum(self, peak: float | None = None) -> LogSum:
        """Return the natural logarithm of the sum of the exponentials of the logits.

        Args:
            peak: the largest logit, or a NaN if there is one, if it is known.

        Raises:
            NumericalError: a logit is a NaN, though the program returned a finite sum.
        """
        if self._log_sum is None:
            self._log_sum = self._computed_sum(peak)
        return self._log_sum

    def _computed_sum(self, peak: float | None) -> LogSum:
        if peak is None:
            peak = self.logits.item(self.logits.argmax())  # twice as fast as `max`
        if math.isnan(peak):
            check_output("step", "logits", self.logits)
        if self.total is None:
            return LogSum(log_sum_exp(self.logits, peak))
        known = LogSum(self.total, self._forbidden)
        remains = (
            peak - self.total >= math.log(LEAST_PART) or known.forbidden_part <= 1 - LEAST_PART
        )
        return known if remains else LogSum(log_sum_exp(self.logits, peak))


def log_sum_exp(row: Floats, peak: float | None = None) -> float:
    """Return the natural logarithm of the sum of the exponentials of a row (V,).

    Args:
        row: any numbers.
        peak: the largest of them, if it is known.
    """
    if peak is None:
        peak = row.item(row.argmax())
    # Subtracting the largest number is needed only where the sum could be infinite or 0.
    shift = 0.0 if abs(peak) < SAFE_PEAK else peak
    total = 0.0
    for start in range(0, row.size, PIECE):
        piece = row[start : start + PIECE]
        total += float(np.add.reduce(np.exp(piece - np.float32(shift) if shift else piece)))
    return shift + math.log(total)
