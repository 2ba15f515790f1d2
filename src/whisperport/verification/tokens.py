"""Compare decoder results: logits under teacher forcing, and freely decoded tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whisperport.program.checks import Check
from whisperport.verification.loss import Loss

# At a flip, another token has the highest logit than in the reference. The flip is hard if the reference's
# highest logit is more than this margin above its second highest. Below the margin, rounding can cause it.
HARD_MARGIN = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGate:
    """The limits for teacher-forced logits at one precision."""

    min_agreement: float  # smallest share of positions without a hard flip
    max_mean_kl: float  # largest mean over positions of KL(expected ‖ actual), in nat
    because: str  # source of the limits
    hard_margin: float = HARD_MARGIN  # a flip is hard above this margin of the reference

    @property
    def rule(self) -> str:
        """The limits in words, for reports."""
        return (
            f"no hard flip at ≥ {self.min_agreement:.1%} of positions, mean KL ≤ "
            f"{self.max_mean_kl:.2g} nat"
        )


_INT8 = TokenGate(
    min_agreement=0.99,
    max_mean_kl=1e-2,
    because="this project's choice for 8 bits; the word error rate is checked as well",
)

TOKEN_GATES: Mapping[str, TokenGate] = {
    "fp32": TokenGate(
        min_agreement=1.0,
        max_mean_kl=1e-5,
        because="60 dB below logits with a standard deviation of 5 is a noise σ of 5e-3; KL ≈ σ²/2",
    ),
    "fp16": TokenGate(
        min_agreement=0.999,
        max_mean_kl=1e-4,
        because="this project's choice; float16 has 11 significant bits, about 66 dB per rounding",
    ),
    "w16a16": TokenGate(
        min_agreement=0.999,
        max_mean_kl=1e-4,
        because="the limits of fp16, which has fewer significant bits",
    ),
    "bf16": _INT8,  # 8 significant bits
    "w8": _INT8,
    "w8a16": _INT8,
    "w8a8": _INT8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenComparison:
    """The result of comparing logits. It is True if the comparison passed."""

    rule: str  # the limits in words
    reason: str  # why it failed; empty: it passed
    n_positions: int = 0
    top1_agreement: float = math.nan  # share of positions with the same token at the highest logit
    hard_flips: int = 0  # number of positions with a hard flip
    mean_kl: float = math.nan  # nat, mean over positions
    worst_position: int | None = None  # position with the largest KL
    worst_kl: float = math.nan  # nat, KL at that position

    def __bool__(self) -> bool:
        return not self.reason

    def numbers(self) -> dict[str, float]:
        """Return the measured numbers by name."""
        numbers = {
            "n_positions": self.n_positions,
            "top1_agreement": self.top1_agreement,
            "hard_flips": self.hard_flips,
            "mean_kl": self.mean_kl,
            "worst_kl": self.worst_kl,
        }
        if self.worst_position is not None:
            numbers["worst_position"] = self.worst_position
        return numbers


def token_gate(precision: str, own: Loss | None) -> TokenGate:
    """Return the limits for a precision, where torch loses `own` of the logits; None: not known.

    An error of σ in each logit causes a KL of about σ²/2; ten times torch's own is allowed.
    """
    gate = TOKEN_GATES[precision]
    if own is None:
        return gate
    return replace(
        gate,
        max_mean_kl=max(gate.max_mean_kl, 10 * own.rms_error**2 / 2),
        hard_margin=luck(own),
    )


def luck(own: Loss | None) -> float:
    """Return the margin below which a precision can change the first choice: 4 times torch's own error."""
    return HARD_MARGIN if own is None else max(HARD_MARGIN, 4 * own.rms_error)


def compare_logits(
    actual: NDArray[Any] | None, expected: NDArray[Any] | None, gate: TokenGate
) -> TokenComparison:
    """Compare teacher-forced logits; sums are computed in float64.

    The comparison fails if either side is missing, empty, not a floating-point matrix, or holds a NaN or an
    infinity; if the shapes differ; or if a number is outside the limits.

    Args:
        actual: (S, V) logits of the bundle; None: there are none.
        expected: (S, V) logits of the reference.
        gate: the limits.
    """
    reason = _incomparable(actual, expected)
    if reason or actual is None or expected is None:
        return TokenComparison(rule=gate.rule, reason=reason)
    kl = np.array([_kl(a, e) for a, e in zip(actual, expected, strict=True)])
    flips = actual.argmax(axis=1) != expected.argmax(axis=1)
    top = np.partition(expected.astype(np.float64), -2, axis=1)[:, -2:]
    hard_flips = int(np.count_nonzero(flips & (top[:, 1] - top[:, 0] > gate.hard_margin)))
    n_positions = len(kl)
    mean_kl = float(kl.mean())
    worst = int(kl.argmax())
    misses = []
    if not 1 - hard_flips / n_positions >= gate.min_agreement:
        misses.append(f"hard flips at {hard_flips} of {n_positions} positions")
    if not mean_kl <= gate.max_mean_kl:
        misses.append(f"mean KL {mean_kl:.2g} nat is above {gate.max_mean_kl:g}")
    return TokenComparison(
        rule=gate.rule,
        reason="; ".join(misses),
        n_positions=n_positions,
        top1_agreement=1 - float(flips.mean()),
        hard_flips=hard_flips,
        mean_kl=mean_kl,
        worst_position=worst,
        worst_kl=float(kl[worst]),
    )


@dataclass(frozen=True, slots=True)
class TokenIdentity:
    """The result of comparing two token sequences. It is True if they are equal."""

    actual: tuple[int, ...]
    expected: tuple[int, ...]
    # Index of the first difference; the shorter length if one sequence is the start of the other.
    first_difference: int | None
    reason: str  # why they differ; empty: they are equal

    rule = "the same tokens from first to last"

    def __bool__(self) -> bool:
        return not self.reason

    def numbers(self) -> dict[str, float]:
        """Return the measured numbers by name."""
        same = len(self.expected) if self.first_difference is None else self.first_difference
        return {"n_expected": len(self.expected), "n_actual": len(self.actual), "n_same": same}


def compare_tokens(actual: Sequence[int], expected: Sequence[int]) -> TokenIdentity:
    """Compare two token sequences. An empty sequence is a failure, because nothing was compared."""
    a, e = tuple(int(token) for token in actual), tuple(int(token) for token in expected)
    for side, tokens in (("reference", e), ("output", a)):
        if not tokens:
            return TokenIdentity(a, e, None if a == e else 0, f"the {side} holds no tokens")
    if a == e:
        return TokenIdentity(a, e, None, "")
    shorter = min(len(a), len(e))
    first = next((i for i in range(shorter) if a[i] != e[i]), shorter)
    return TokenIdentity(a, e, first, f"token {first} of {len(e)} is the first to differ")


def reported(check: Check, because: str = "the error rate decides") -> Check:
    """Return the check with its numbers but as passed, unless nothing could be compared."""
    if not check.value or any(map(math.isnan, check.value.values())):
        return check
    return replace(check, rule=f"reported only: {because}", passed=True, reason="")


def _incomparable(actual: Any, expected: Any) -> str:
    """Return why logits cannot be compared; empty if they can."""
    for side, logits in (("output", actual), ("reference", expected)):
        if logits is None:
            return f"the {side} is missing"
        if not isinstance(logits, np.ndarray) or logits.dtype.kind != "f" or logits.ndim != 2:
            kind = f"{logits.dtype} {logits.shape}" if isinstance(logits, np.ndarray) else logits
            return f"the {side} is not a floating-point matrix (positions, vocabulary) but {kind}"
        if logits.shape[0] == 0 or logits.shape[1] < 2:
            return f"the {side} has shape {logits.shape}; expected at least 1 position and 2 tokens"
    if actual.shape != expected.shape:
        return f"expected shape {expected.shape}, got {actual.shape}"
    for side, logits in (("output", actual), ("reference", expected)):
        if not np.isfinite(logits).all():
            return f"the {side} holds a value that is NaN or infinite"
    return ""


def _kl(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return KL(expected ‖ actual) in nat for the logits (V,) of one position."""
    p, q = _log_softmax(expected), _log_softmax(actual)
    return max(0.0, float(np.sum(np.exp(p) * (p - q))))  # negative only by rounding


def _log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - math.log(float(np.sum(np.exp(shifted))))
