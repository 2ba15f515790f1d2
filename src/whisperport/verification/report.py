"""The report of a verification: all comparisons, and the machine that ran them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whisperport.program.checks import LEVELS, Check, Level
from whisperport.program.json_records import from_json, members
from whisperport.program.strict_json import plain
from whisperport.verification.error_rate import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipText:
    """What a bundle transcribes in a clip of its reference."""

    clip: str  # name
    text: str
    expected: str  # what the checkpoint transcribes in float32
    correct: str  # transcript; empty: not known
    unit: Unit  # in which errors are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All checks of a bundle. True if each required level has a check and all checks passed."""

    subject: str  # name of the bundle
    checks: tuple[Check, ...]
    machine: Mapping[str, Any] = field(default_factory=dict)  # description as JSON data
    versions: Mapping[str, str] = field(default_factory=dict)  # package -> installed version
    seconds: float = 0.0  # duration of the verification
    required: tuple[Level, ...] = LEVELS  # levels that must have a check
    texts: tuple[ClipText, ...] = ()  # of each clip

    def __bool__(self) -> bool:
        return not self.failures()

    def failures(self) -> tuple[str, ...]:
        """Return one sentence per failure; empty if the report passed."""
        sentences = [
            f"{check.program}, {check.what} ({check.level}): {check.reason}"
            for check in self.checks
            if not check.passed
        ]
        checked = {check.level for check in self.checks}
        sentences += [
            f"nothing was compared at the level `{level}`"
            for level in self.required
            if level not in checked
        ]
        if not self.checks and not self.required:
            sentences.append("nothing was compared")
        return tuple(sentences)

    def summary(self) -> list[dict[str, str]]:
        """Return one table row per check, as text by column name."""
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
        """Return JSON data, with NaN, infinity and minus infinity as strings."""
        return {"subject": self.subject, "passed": bool(self), **members(self)}

    @classmethod
    def from_json(cls, data: Any) -> "Report":
        """Read the data that `to_json` returned.

        Raises:
            BundleError: a field is missing or wrong; the message names the field.
        """
        passed, rest = plain(data, "report").split("passed")
        report = from_json(cls, rest)
        if passed.boolean() != bool(report):
            passed.reject(f"is {passed.value}, but its checks result in {bool(report)}")
        return report


def _short(number: float) -> str:
    return f"{number:.4g}" if isinstance(number, float) and abs(number) < 0.99 else f"{number:.6g}"
