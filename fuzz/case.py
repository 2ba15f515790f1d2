"""One input of a campaign, and what came of it."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

ACCEPTED, REJECTED = "accepted", "rejected"  # every other outcome is a finding

Make = Callable[[Random, Path, Path, str], None]
"""Writes an input: random numbers, the folder of seeds, the folder to write to, the folder outside."""


@dataclass(frozen=True)
class Format:
    """A kind of input, and who reads it."""

    name: str
    reader: str  # what a user would call, for the table
    groups: Sequence[str]  # of seeds
    make: Make
    run: Callable[[Path], None]  # given the folder; raises what a user would see
    share: int  # of a campaign of 20,000


@dataclass(frozen=True)
class Outcome:
    """What came of one input."""

    kind: str  # ACCEPTED, REJECTED, or what went wrong
    detail: str = ""
    where: str = ""  # by which findings are told apart
    seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def is_finding(self) -> bool:
        return self.kind not in (ACCEPTED, REJECTED)


def random_for(seed: int, name: str, number: int) -> Random:
    """The same numbers for the same input of the same campaign, on every machine."""
    return Random(zlib.crc32(f"{seed}/{name}/{number}".encode()))
