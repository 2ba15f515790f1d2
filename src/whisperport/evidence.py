"""What was done with one program, on which files, where and when; and the status that follows from it.

A status is never stored. It is computed from the evidence about files that have not changed since.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from whisperport.checks import Check

Kind = Literal["partitioned", "compiled", "emulated", "simulated", "run"]
KINDS: tuple[Kind, ...] = get_args(Kind)
RAN = frozenset({"emulated", "simulated", "run"})  # kinds that compared outputs of the program

Status = Literal[
    "checked against vendor documentation",
    "accepted by the vendor's partitioner",
    "compiled here",
    "simulated here",
    "run here",
]
STATUSES: tuple[Status, ...] = get_args(Status)  # weakest first

# Emulation on the CPU is not in the table: it runs what the vendor's compiler is given, not what the
# compiler makes of it.
_STATUS_OF: Mapping[Kind, Status] = {
    "partitioned": "accepted by the vendor's partitioner",
    "compiled": "compiled here",
    "simulated": "simulated here",
    "run": "run here",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One thing that was done with a program.

    Raises:
        ValueError: no such kind, or no file.
    """

    kind: Kind
    files: Mapping[str, str]  # path in the bundle -> SHA-256 of the file at that time
    runtime: Mapping[str, str]  # package or tool that did it -> version
    machine: Mapping[str, Any]  # JSON: where it was done
    date: str  # as 2026-11-22, in UTC; empty: not known
    checks: tuple[Check, ...] = ()  # what was compared

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r} is none of {KINDS}")
        if not self.files:
            raise ValueError("it is about no file")

    @property
    def passed(self) -> bool:
        """Whether every comparison passed. A program that ran without a comparison did not pass."""
        return all(check.passed for check in self.checks) and (
            bool(self.checks) or self.kind not in RAN
        )


def with_added(old: Iterable[Evidence], new: Evidence) -> tuple[Evidence, ...]:
    """Evidence with one more; it replaces what the same runtime did before on that machine."""

    def how(one: Evidence) -> tuple[object, ...]:
        return one.kind, one.runtime, one.machine

    return (*(one for one in old if how(one) != how(new)), new)


def status_of(evidence: Iterable[Evidence]) -> Status:
    """The strongest status that the evidence supports; evidence that did not pass supports none."""
    found = [_STATUS_OF[one.kind] for one in evidence if one.passed and one.kind in _STATUS_OF]
    return max(found, key=STATUSES.index, default=STATUSES[0])
