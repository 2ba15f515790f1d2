"""Checks: single comparisons of a program with its reference, each passed or failed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

# Under these names for `verification`, too.
from whisperport.program.program_kind import (
    ALIGN,
    CROSS_KV,
    ENCODER,
    kind_of,
)
from whisperport.program.program_kind import (
    COARSE_PROJECTION as COARSE_PROJECTION,
)
from whisperport.program.program_kind import (
    UNCACHED_DECODER as UNCACHED_DECODER,
)
from whisperport.program.program_kind import (
    VOCAB_PROJECTION as VOCAB_PROJECTION,
)

Level = Literal["arrays", "tokens", "words", "isolation", "operators"]
ALL_LEVELS: tuple[Level, ...] = get_args(Level)
LEVELS = ALL_LEVELS[:4]  # those of a verification, which compares outputs

ALL_PROGRAMS = (
    "all programs"  # `Check.program` for a result of all programs but the uncached decoder
)
SHORT_WINDOWS = "short windows"  # `Check.what` for texts of windows as short as the audio


class Compared(Protocol):
    """The result of a comparison, as `compare`, `compare_logits` and `compare_tokens` return it."""

    @property
    def rule(self) -> str: ...
    @property
    def reason(self) -> str: ...
    def numbers(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison of a program with its reference.

    Attributes:
        level: what is compared: arrays, tokens, words, or the isolation of sessions; or the operators of a
            program with those that the vendor's partitioner accepts.
        program: the program that computed the result, such as "encoder". For several programs:
            "prefill + step", "prefill, longer" or "all programs".
        what: the output or the clip that is compared, such as "features".
        value: name of a number -> the number. A check without numbers cannot pass, and neither can a check
            with a NaN.
        rule: the limits, as a sentence.
        passed: whether the comparison passed.
        reason: why the comparison failed; empty if it passed.

    Raises:
        ValueError: the level is unknown, or `passed` contradicts `reason` or `value`.
    """

    level: Level
    program: str
    what: str
    value: Mapping[str, float]
    rule: str
    passed: bool
    reason: str = ""

    def __post_init__(self) -> None:
        if self.level not in ALL_LEVELS:
            raise ValueError(f"level {self.level!r} is not one of {ALL_LEVELS}")
        if self.passed == bool(self.reason):
            raise ValueError("a failed check needs a reason, and a passed check must have none")
        if self.passed and not self.value:
            raise ValueError("a check without numbers cannot pass")
        if self.passed and any(math.isnan(number) for number in self.value.values()):
            raise ValueError("a check with a NaN cannot pass")

    @classmethod
    def of(cls, level: Level, program: str, what: str, compared: Compared) -> "Check":
        """Create a check from the result of a comparison."""
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
        """Return whether the named program contributed to the compared result.

        `uncached_decoder` and `step_B` contribute to their own results only, `encoder_T` and `cross_kv_T`
        to short windows too, and `coarse_projection` to decoded texts too. `cross_kv` contributes to every
        result of the decoder with KV cache, and `vocab_projection` to all but those of `align`, whose
        logits the host computes.
        """
        if self.program == program:
            return True
        kind = kind_of(program)
        if kind.positions:
            return self.what == SHORT_WINDOWS
        if kind.is_batch or kind.name == UNCACHED_DECODER:
            return False
        if self.program in (ENCODER, UNCACHED_DECODER, COARSE_PROJECTION):
            return False
        if kind_of(self.program).positions:
            return False
        if self.program == ALL_PROGRAMS or kind.name == CROSS_KV:
            return True
        if kind.name == VOCAB_PROJECTION:
            return self.program != ALIGN
        return kind.name in self.program.replace(",", "").split()
