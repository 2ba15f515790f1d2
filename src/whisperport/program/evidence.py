"""Evidence: records of what was done with a program, and the status that follows from these records.

A status is never stored. It is computed from the evidence about files that have not changed since.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from whisperport.program.checks import Check
from whisperport.program.strict_json import Field

Kind = Literal["partitioned", "compiled", "emulated", "simulated", "run"]
KINDS: tuple[Kind, ...] = get_args(Kind)
RAN = frozenset({"emulated", "simulated", "run"})  # kinds that compare outputs of the program

Status = Literal[
    "checked against vendor documentation",
    "accepted by the vendor's partitioner",
    "compiled here",
    "simulated here",
    "run here",
]
STATUSES: tuple[Status, ...] = get_args(Status)  # weakest first

# Emulation on the CPU gives no status: it runs the input of the vendor's compiler, not its output.
_STATUS_OF: Mapping[Kind, Status] = {
    "partitioned": "accepted by the vendor's partitioner",
    "compiled": "compiled here",
    "simulated": "simulated here",
    "run": "run here",
}


def _date(date: Field) -> str:
    if not re.fullmatch(r"(\d{4}-\d{2}-\d{2})?", date.text(), re.ASCII):
        date.reject(f"is {date.text()[:80]!r}; expected a date such as 2026-11-22")
    return date.text()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A record that a program was partitioned, compiled, emulated, simulated or run.

    Attributes:
        kind: what was done with the program.
        files: path in the bundle -> SHA-256 of the file at that time.
        runtime: name of the package or tool that was used -> its version.
        machine: description of the machine that was used, as JSON.
        date: the date in UTC, such as 2026-11-22; empty if it is not known.
        checks: comparisons that were made, if any.

    Raises:
        ValueError: the kind is unknown, or `files` is empty.
    """

    kind: Kind
    files: Mapping[str, Annotated[str, Field.sha256]]
    runtime: Mapping[str, str]
    machine: Mapping[str, Any]
    date: Annotated[str, _date]
    checks: tuple[Check, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r} is not one of {KINDS}")
        if not self.files:
            raise ValueError("the evidence names no file")

    @property
    def passed(self) -> bool:
        """Whether every comparison passed. Evidence of a run without a comparison has not passed."""
        return all(check.passed for check in self.checks) and (
            bool(self.checks) or self.kind not in RAN
        )


def with_added(old: Iterable[Evidence], new: Evidence) -> tuple[Evidence, ...]:
    """Return `old` and `new`; `new` replaces evidence of the same kind, runtime and machine."""

    def key(record: Evidence) -> tuple[object, ...]:
        return record.kind, record.runtime, record.machine

    return (*(record for record in old if key(record) != key(new)), new)


def status_of(evidence: Iterable[Evidence]) -> Status:
    """Return the strongest status that the evidence supports. Evidence that did not pass is ignored."""
    statuses = [
        _STATUS_OF[record.kind]
        for record in evidence
        if record.passed and record.kind in _STATUS_OF
    ]
    return max(statuses, key=STATUSES.index, default=STATUSES[0])
