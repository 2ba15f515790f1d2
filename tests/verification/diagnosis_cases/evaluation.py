"""Compare what a diagnosis says about the cases with what is true.

This is the only module that knows both: the labels of the cases, and the package's names of causes.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from .cases import Case

CODES: Mapping[str, str] = {  # label of the cases -> name of the cause
    "other clip": "other-clip",
    "other window": "other-window",
    "silent input": "silent-input",
    "samples not scaled": "audio-not-scaled",
    "mel transposed": "mel-transposed",
    "mel not normalized": "mel-not-normalized",
    "mel without floor": "mel-not-clamped",
    "natural log": "natural-log",
    "wrong mel bins": "wrong-mel-bins",
    "mel frames": "wrong-mel-frames",
    "quantization error": "quantization-error",
    "not finite": "not-finite",
    "frame shift": "frame-shift",
    "channel blocks": "channel-blocks-reordered",
    "outputs swapped": "outputs-swapped",
    "saturated": "saturated",
    "integer file": "integers-read-as-floats",
    "not dequantized": "not-dequantized",
    "wrong scale": "wrong-scale",
    "wrong zero point": "wrong-zero-point",
    "signedness": "wrong-signedness",
    "axes permuted": "axes-permuted",
    "padded axis": "padded-axis",
    "channel tiles": "channel-tiles",
    "stale buffer": "stale-buffer",
    "zero tail": "zero-tail",
    "constant": "constant",
    "half precision": "half-precision",
    "bfloat16": "bfloat16",
    "double precision": "double-precision",
    "byte order": "byte-order",
    "bytes as numbers": "floats-read-as-integers",
    "extra bytes": "extra-bytes",
    "truncated": "truncated",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a diagnosis says about one file."""

    passed: bool
    causes: frozenset[str]


Diagnose = Callable[[Case], Answer]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case and its answer, in names of causes."""

    case: Case
    answer: Answer
    right: frozenset[str]  # the accepted set that is nearest to the answer
    seconds: float

    @property
    def found(self) -> frozenset[str]:
        """Causes that were named and are true."""
        return self.right & self.answer.causes

    @property
    def missed(self) -> frozenset[str]:
        """Causes that are true and were not named; `passed` if a wrong file passed."""
        return self.right - self.answer.causes

    @property
    def wrong(self) -> frozenset[str]:
        """Causes that were named and are not true; `not passed` if a right file did not pass."""
        named = self.answer.causes - self.right
        if not self.case.labels and not self.answer.passed:
            return named | {"not passed"}
        return named

    @property
    def exact(self) -> bool:
        """Whether exactly the true causes were named, and only a right file passed."""
        return not self.missed and not self.wrong and self.answer.passed == (not self.case.labels)


@dataclass(slots=True)
class Score:
    """Counts over outcomes."""

    found: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    cases: int = 0
    exact: int = 0

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> "Score":
        """Count outcomes."""
        score = cls()
        for outcome in outcomes:
            score.cases += 1
            score.exact += outcome.exact
            score.found.update(outcome.found)
            score.missed.update(outcome.missed)
            score.wrong.update(outcome.wrong)
        return score

    @property
    def precision(self) -> float:
        """Share of the named causes that are true."""
        return _share(self.found.total(), self.wrong.total())

    @property
    def recall(self) -> float:
        """Share of the true causes that were named."""
        return _share(self.found.total(), self.missed.total())

    def of_cause(self, cause: str) -> tuple[float, float]:
        """Return precision and recall of one cause."""
        found = self.found[cause]
        return _share(found, self.wrong[cause]), _share(found, self.missed[cause])


def _share(right: int, not_right: int) -> float:
    return right / (right + not_right) if right + not_right else float("nan")


def evaluate(case: Case, diagnose: Diagnose) -> Outcome:
    """Ask for a diagnosis of one case, and compare it with the truth."""
    started = time.perf_counter()
    answer = diagnose(case)
    seconds = time.perf_counter() - started
    accepted = (frozenset(CODES[label] for label in labels) for labels in case.accepted)
    right = min(accepted, key=lambda causes: len(causes ^ answer.causes))
    return Outcome(case, answer, right, seconds)
