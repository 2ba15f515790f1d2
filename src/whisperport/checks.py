"""One comparison of a program with its reference, and whether it passed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

Level = Literal["arrays", "tokens", "words", "isolation"]
LEVELS: tuple[Level, ...] = get_args(Level)

ALL_PROGRAMS = "all programs"  # `Check.program` of what all programs but the uncached decoder did
UNCACHED_DECODER = "uncached_decoder"


class Compared(Protocol):
    """What `compare`, `compare_logits` and `compare_tokens` return."""

    @property
    def rule(self) -> str: ...
    @property
    def reason(self) -> str: ...
    def numbers(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison. It cannot pass without a number, or with a NaN among its numbers."""

    level: Level
    program: str  # "encoder"; "prefill + step", "prefill, longer" or "all programs" for several
    what: str  # the output or clip: "features"
    value: Mapping[str, float]
    rule: str  # in words
    passed: bool
    reason: str = ""  # why it failed; empty when it passed

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level {self.level!r} is none of {LEVELS}")
        if self.passed == bool(self.reason):
            raise ValueError("a check that failed has a reason, and one that passed has none")
        if self.passed and not self.value:
            raise ValueError("a check that measured nothing cannot pass")
        if self.passed and any(math.isnan(number) for number in self.value.values()):
            raise ValueError("a check that measured a NaN cannot pass")

    @classmethod
    def of(cls, level: Level, program: str, what: str, compared: Compared) -> "Check":
        """A check from a comparison."""
        return cls(
            level=level,
            program=program,
            what=what,
            value=compared.numbers(),
            rule=compared.rule,
            passed=not compared.reason,
            reason=compared.reason,
        )

    def involves(self, program: str) -> bool:
        """Whether the program of this name had a part in what was compared.

        `cross_kv` has a part in whatever the decoder with a cache does.
        """
        if self.program == program:
            return True
        if program == UNCACHED_DECODER or self.program in ("encoder", UNCACHED_DECODER):
            return False
        if self.program == ALL_PROGRAMS or program == "cross_kv":
            return True
        return program.partition("_")[0] in self.program.replace(",", "").split()
