"""One input of a campaign, and its outcome."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

ACCEPTED, REJECTED = "accepted", "rejected"  # every other outcome is a finding

Make = Callable[[Random, Path, Path, str], None]
"""Writes an input; called with random numbers, folder of seeds, folder to write to, folder outside."""


@dataclass(frozen=True)
class Format:
    """A kind of input, and the function that reads it."""

    name: str
    reader: str  # name of the function or command that a user would call, for the table
    groups: Sequence[str]  # groups of seeds that it needs
    make: Make
    run: Callable[[Path], None]  # called with the folder; raises the errors that a user would see
    share: int  # number of inputs in a campaign of 20,000
    imports: Sequence[str] = ()  # modules that its child processes import; they run in forks


@dataclass(frozen=True)
class Outcome:
    """The outcome of one input."""

    kind: str  # ACCEPTED, REJECTED, or the kind of finding
    detail: str = ""
    where: str = ""  # place in the code, which distinguishes findings
    seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def is_finding(self) -> bool:
        return self.kind not in (ACCEPTED, REJECTED)


def random_for(seed: int, name: str, number: int) -> Random:
    """Return random numbers that depend only on the seed, the format and the number of the input."""
    return Random(zlib.crc32(f"{seed}/{name}/{number}".encode()))
