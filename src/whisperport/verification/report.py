"""Numbers, the rule, pass or fail, and where it was measured."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Protocol, get_args

from whisperport.bundle.strict_json import Field, plain

Level = Literal["arrays", "tokens", "words", "isolation"]
LEVELS: tuple[Level, ...] = get_args(Level)

# JSON has no word for these, and a report may well hold them: the SQNR of equal arrays is infinite.
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Compared(Protocol):
    """What `compare`, `compare_logits` and `compare_tokens` return."""

    @property
    def rule(self) -> str: ...
    @property
    def reason(self) -> str: ...
    def numbers(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing compared. It cannot pass without a number, or with a NaN among them."""

    level: Level
    program: str  # "encoder", or what the programs did together: "transcribe"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All checks of one bundle. True only if every required level was checked, and all passed."""

    subject: str  # what was checked: a bundle's name
    checks: tuple[Check, ...]
    machine: Mapping[str, Any] = field(default_factory=dict)  # JSON
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0  # how long checking took
    required: tuple[Level, ...] = LEVELS  # levels without which the report is no pass

    def __bool__(self) -> bool:
        return not self.failures()

    def failures(self) -> tuple[str, ...]:
        """What went wrong, one sentence each; empty when nothing did."""
        sentences = [
            f"{check.program}, {check.what} ({check.level}): {check.reason}"
            for check in self.checks
            if not check.passed
        ]
        checked = {check.level for check in self.checks}
        sentences += [
            f"nothing was compared at the level of {level}"
            for level in self.required
            if level not in checked
        ]
        if not self.checks and not self.required:
            sentences.append("nothing was compared")
        return tuple(sentences)

    def summary(self) -> list[dict[str, str]]:
        """One row for each check, as text for a table."""
        return [
            {
                "level": check.level,
                "program": check.program,
                "what": check.what,
                "measured": ", ".join(f"{name} {_short(n)}" for name, n in check.value.items()),
                "rule": check.rule,
                "result": "pass" if check.passed else f"FAIL: {check.reason}",
            }
            for check in self.checks
        ]

    def to_json(self) -> dict[str, Any]:
        """JSON without NaN or infinity: those three numbers are written as strings."""
        return {
            "subject": self.subject,
            "passed": bool(self),
            "checks": [
                asdict(check) | {"value": {n: _number(v) for n, v in check.value.items()}}
                for check in self.checks
            ],
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "seconds": self.seconds,
            "required": list(self.required),
        }

    @classmethod
    def from_json(cls, data: Any) -> "Report":
        """Raises BundleError, naming the field, for anything `to_json` would not have written."""
        top = plain(data, "report")
        m = top.members([*(f.name for f in fields(cls)), "passed"])
        m["machine"].mapping()
        report = cls(
            subject=m["subject"].text(),
            checks=tuple(_check(check) for check in m["checks"].elements()),
            machine=dict(m["machine"].value),
            versions={name: v.text() for name, v in m["versions"].mapping().items()},
            seconds=m["seconds"].number(),
            required=tuple(_level(level) for level in m["required"].elements()),
        )
        if m["passed"].flag() != bool(report):
            m["passed"].refuse(f"is {m['passed'].value}, and its checks say {bool(report)}")
        return report


def _check(check: Field) -> Check:
    m = check.members([f.name for f in fields(Check)])
    try:
        return Check(
            level=_level(m["level"]),
            program=m["program"].text(),
            what=m["what"].text(),
            value={name: _float(number) for name, number in m["value"].mapping().items()},
            rule=m["rule"].text(),
            passed=m["passed"].flag(),
            reason=m["reason"].text(),
        )
    except ValueError as error:
        check.refuse(f"contradicts itself: {error}")


def _level(level: Field) -> Level:
    known = next((known for known in LEVELS if known == level.text()), None)
    if known is None:
        level.refuse(f"is {level.text()[:80]!r}; expected one of {LEVELS}")
    return known


def _number(number: float) -> float | str:
    """A plain number, also from numpy's own."""
    if isinstance(number, int):
        return number
    number = float(number)
    return number if math.isfinite(number) else str(number)


def _float(number: Field) -> float:
    if isinstance(number.value, str) and number.value in NOT_FINITE:
        return NOT_FINITE[number.value]
    number.number()
    value: float = number.value  # an int stays one: a count is not 3.0
    return value


def _short(number: float) -> str:
    return f"{number:.4g}" if isinstance(number, float) and abs(number) < 0.99 else f"{number:.6g}"
